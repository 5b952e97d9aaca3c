"""Labels told against labels generated: the same rows, and the engine that does both."""

from pipeline.bench.choice import CHOOSE, CONSTRAINED, FREE, LABELS, bench_choice


def test_every_way_serves_the_same_rows_and_choosing_computes_least_for_labels_of_one_token():
    told = bench_choice(rows=6, own_tokens=12, rounds=1, threads=1)
    assert [one.name for one in told.sets] == list(LABELS)
    assert (told.rows, told.own_tokens) == (6, 72)
    assert told.prompt_tokens > told.own_tokens
    for one in told.sets:
        assert set(one.rows_per_s) == {CHOOSE, CONSTRAINED, FREE}
        assert all(rate > 0 for rates in one.rows_per_s.values() for rate in rates)
        assert one.by(FREE).median == one.rows_per_s[CHOOSE][0] / one.rows_per_s[FREE][0]
    first, *longer = told.sets
    assert first.label_tokens == 1
    assert all(one.label_tokens > 1 for one in longer)
    assert first.computed_tokens[FREE] == first.computed_tokens[CHOOSE] + 2 * 6
    text, raw = told.to_text(), told.to_json()
    assert "one word, 1 tokens" in text
    assert raw["bench"] == "choice"
    assert raw["sets"][0]["ratios"][FREE]["count"] == 1
