"""Life-cycle batches cross process borders unchanged."""

import pickle

from serve_app.router.lifecycle import Closed, FirstToken, LifecycleBatch, Opened


def test_batch_survives_pickling() -> None:
    events = (
        Opened("r", 0.5),
        FirstToken("r", 0.25, cached_tokens=16, prompt_tokens=40),
        Closed("r", 200, "finished", 1.5, 0.25, prompt_tokens=40, cached_tokens=16, output_tokens=9),
    )
    batch = LifecycleBatch("a", "a-1", 7, events, frozenset({"s"}))
    assert pickle.loads(pickle.dumps(batch)) == batch
    assert LifecycleBatch("a", "a-1", 8, ()).open_ids is None
