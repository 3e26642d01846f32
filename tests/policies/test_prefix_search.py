from serve_app.policies.prefix_search import longest_prefix


def test_longest_prefix_is_found_from_any_guess_in_two_calls_when_it_is_right() -> None:
    for length in range(20):
        for answer in range(length + 1):
            for guess in range(25):
                calls: list[int] = []

                def holds(index: int, answer: int = answer, calls: list[int] = calls) -> bool:
                    calls.append(index)
                    return index < answer

                assert longest_prefix(holds, length, guess) == answer
                assert all(0 <= index < length for index in calls)
                assert guess != answer or len(calls) <= 2
