"""What an ingress' state says of a KV-event feed: seconds, or nothing before there is something to say."""

import json
import math
from dataclasses import replace

from serve_app.deployments.ingress import feed_figures
from serve_app.router.kv_event_feed import FeedState
from serve_app.router.kv_events import KvEventSubscriber
from serve_app.router.prefix_index import PrefixIndex


def test_figures_of_a_feed_are_none_until_it_is_heard_and_ready_for_json() -> None:
    unheard = FeedState(math.inf, math.nan, True, True, math.inf, False)
    heard = replace(unheard, silent_s=0.25, lag_s=0.01)
    assert feed_figures(unheard) == {"silent_s": None, "lag_s": None}
    assert feed_figures(heard) == {"silent_s": 0.25, "lag_s": 0.01}


async def test_a_real_feed_that_nobody_publishes_has_no_figures() -> None:
    subscriber = KvEventSubscriber(PrefixIndex(100))
    try:
        await subscriber.follow("a", "a", "tcp://127.0.0.1:1", None)
        feed = subscriber.feed("a")
        assert feed is not None
        assert json.dumps(feed_figures(feed)) == '{"silent_s": null, "lag_s": null}'
    finally:
        await subscriber.close()
