"""What structured outputs cost: rows with and without a grammar do equal work, and it is counted."""

from pipeline.bench.grammar import AGAIN, ANY, FREE, JSON, bench_grammar


def test_every_way_generates_the_same_number_of_tokens_and_only_grammars_fill_masks():
    told = bench_grammar(rows=3, rounds=1, dtype="float32", threads=1)
    ways = {way.name: way for way in told.ways}
    assert set(ways) == {FREE, ANY, JSON, AGAIN}
    assert len({way.tokens for way in told.ways}) == 1
    assert ways[FREE].masked_tokens == ways[AGAIN].filled_masks == 0
    assert ways[JSON].forced_tokens > 0
    assert ways[JSON].steps < ways[FREE].steps, "forced tokens take no step"
    assert ways[ANY].masked_tokens == ways[ANY].tokens
    assert 0 < ways[ANY].filled_masks < 0.03 * ways[ANY].tokens, "a best token that is allowed needs none"
    text = told.to_text()
    assert "any text" in text
    assert told.to_json()["bench"] == "grammar"
