"""Where generation ends, what streamers and criteria see, and what is refused before the target has run."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from helpers import CASES, Case, make_case, oracle
from torch import Tensor
from transformers import (
    DynamicCache,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)

from lantern_hf import TREES, LanternConfig, lantern_generate
from lantern_hf.cache import CACHE_KEYWORD


def drafts(case: Case, **kwargs: Any) -> list[Any]:
    """A head, an oracle whose long paths end anywhere, and plain decoding."""
    long = case.plain(do_sample=False, max_new_tokens=70)
    return [case.head(), oracle(case, long, TREES["wide_57"], misses=0.1), None]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_end_token_ends_a_row_inside_a_path(name: str, rows: int) -> None:
    case = make_case(name, rows)
    start = case.inputs["input_ids"].shape[1]
    new = case.plain(do_sample=False, max_new_tokens=20)[:, start:]
    for place in (0, 3, 8):
        ends = [int(new[0, place]), int(new[-1, 12])]
        kwargs = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": ends, "pad_token_id": 1}
        expected = case.plain(**kwargs)
        for assistant in drafts(case):
            assert torch.equal(case.lantern(assistant, "eagle_25", **kwargs), expected)


def test_ended_rows_are_padded() -> None:
    case = make_case("llama", 3)
    ends = case.plain(do_sample=False, max_new_tokens=9)[0, 8:10].tolist()
    kwargs = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": ends, "pad_token_id": 39}
    output = case.lantern(drafts(case)[1], **kwargs)
    assert torch.equal(output, case.plain(**kwargs))
    assert (output == 39).any()


@pytest.mark.parametrize("new", [1, 2, 5, 6, 7, 63])
def test_the_length_is_exact(new: int) -> None:
    for name in ("llama", "llamagen"):
        case = make_case(name, 2)
        expected = case.plain(do_sample=False, max_new_tokens=new)
        for assistant in drafts(case):
            output = case.lantern(assistant, do_sample=False, max_new_tokens=new, return_dict_in_generate=True)
            assert torch.equal(output.sequences, expected)
            assert output.stats.new_tokens == [new, new]


def test_max_length_and_min_new_tokens() -> None:
    case = make_case("llama", 3)
    ends = case.plain(do_sample=False, max_new_tokens=4)[:, 6:].flatten().unique().tolist()
    for kwargs in ({"max_length": 17}, {"max_length": 25, "min_new_tokens": 9, "eos_token_id": ends}):
        expected = case.plain(do_sample=False, pad_token_id=0, **kwargs)
        for assistant in drafts(case):
            assert torch.equal(case.lantern(assistant, do_sample=False, pad_token_id=0, **kwargs), expected)


def test_max_time_ends_after_the_token_that_passed_it() -> None:
    case = make_case("llama", 2)
    for assistant in drafts(case):
        output = case.lantern(assistant, do_sample=False, max_new_tokens=5000, max_time=0.0)
        assert torch.equal(output, case.plain(do_sample=False, max_new_tokens=1))
    start = time.perf_counter()
    case.lantern(case.head(), do_sample=False, max_new_tokens=50000, max_time=0.2)
    assert time.perf_counter() - start < 20


class Recorder(StoppingCriteria):
    """Notes what it was asked, and ends a row at a token or after some calls."""

    def __init__(self, token: int, calls: int = 1000):
        self.token, self.limit = token, calls
        self.seen: list[tuple[list[list[int]], bool]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append((input_ids.tolist(), scores is None))
        ended = (input_ids[:, -1] == self.token) | (len(self.seen) >= self.limit)
        return ended.to(torch.bool)


@pytest.mark.parametrize("limit", [4, 1000])
def test_custom_criteria_are_asked_as_plain_decoding_asks_them(limit: int) -> None:
    case = make_case("llama")
    token = int(case.plain(do_sample=False, max_new_tokens=30)[0, 20])
    reference = Recorder(token, limit)
    kwargs = {"do_sample": False, "max_new_tokens": 30}
    expected = case.plain(stopping_criteria=StoppingCriteriaList([reference]), **kwargs)
    for assistant in drafts(case):
        criterion = Recorder(token, limit)
        output = case.lantern(assistant, stopping_criteria=StoppingCriteriaList([criterion]), **kwargs)
        assert torch.equal(output, expected)
        assert [ids for ids, _ in criterion.seen] == [ids for ids, _ in reference.seen]


def test_custom_criteria_see_scores_when_they_are_kept() -> None:
    case = make_case("llama", 2)
    kwargs = {"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True}

    class LowScore(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            self.counts = [*getattr(self, "counts", []), len(scores)]
            return scores[-1].amax(-1) < 0  # never on these targets

    criterion = LowScore()
    output = case.lantern(drafts(case)[1], stopping_criteria=StoppingCriteriaList([criterion]), **kwargs)
    assert torch.equal(output.sequences, case.plain(do_sample=False, max_new_tokens=12))
    assert set(criterion.counts) == set(range(1, 13))


def test_custom_criteria_end_rows_of_a_batch_one_by_one() -> None:
    case = make_case("llama", 3)
    long = case.plain(do_sample=False, max_new_tokens=20)
    tokens = [int(long[row, 10 + row]) for row in range(3)]

    class PerRow(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return input_ids[:, -1] == torch.tensor(tokens)

    kwargs = {"stopping_criteria": StoppingCriteriaList([PerRow()]), "pad_token_id": 0, "max_new_tokens": 20}
    for assistant in drafts(case):
        output = case.lantern(assistant, do_sample=False, **kwargs)
        for row, token in enumerate(tokens):
            end = 6 + long[row, 6:].tolist().index(token) + 1
            assert output[row, :end].tolist() == long[row, :end].tolist()
            assert (output[row, end:] == 0).all()


class Streamer:
    """Records everything it gets."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize("rows", [1, 3])
def test_streamers_see_what_plain_decoding_shows(rows: int) -> None:
    case = make_case("llama", rows)
    ends = case.plain(do_sample=False, max_new_tokens=12)[0, 12:14].tolist()
    kwargs = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": ends, "pad_token_id": 0}
    reference = Streamer()
    case.plain(streamer=reference, **kwargs)
    for assistant in drafts(case):
        streamer = Streamer()
        case.lantern(assistant, lantern_streamer=streamer, **kwargs)
        assert streamer.calls == reference.calls


def test_streamers_get_columns_as_soon_as_every_row_has_them() -> None:
    case = make_case("llama", 2)
    streamer, seen = Streamer(), []
    long = case.plain(do_sample=False, max_new_tokens=16)

    def on_round(session: Any) -> None:
        seen.append((len(streamer.calls) - 1, min(session.sequences.lengths) - 6))

    draft = oracle(case, long, TREES["wide_57"], misses=0.3)
    case.lantern(draft, do_sample=False, max_new_tokens=16, lantern_streamer=streamer, on_round=on_round)
    assert all(sent == complete for sent, complete in seen[:-1])
    assert streamer.calls[-1] == "end"


def test_num_return_sequences() -> None:
    case = make_case("llamagen", 2)
    kwargs = {"do_sample": True, "max_new_tokens": 10, "num_return_sequences": 3}
    generators = [torch.Generator().manual_seed(row) for row in range(6)]
    output = case.lantern(case.head(), generator=generators, **kwargs)
    assert output.shape == (6, 16)
    assert len({tuple(row) for row in output.tolist()}) == 6


def test_num_return_sequences_repeats_the_unconditional_prompt() -> None:
    case = make_case("llama", 2, 2.0)
    alone = case.lantern(case.head(), do_sample=True, max_new_tokens=8, generator=[seeded(0), seeded(3)])
    many = case.lantern(
        case.head(),
        do_sample=True,
        max_new_tokens=8,
        num_return_sequences=3,
        generator=[seeded(row) for row in range(6)],
    )
    assert torch.equal(many[[0, 3]], alone)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a case whose target must not run."""

    def make(name: str = "llama", rows: int = 1, guidance: float | None = None) -> Case:
        case = make_case(name, rows, guidance)

        def never(*args: Any, **kwargs: Any) -> None:
            pytest.fail("the target ran")

        monkeypatch.setattr(case.model.base_model, "forward", never)
        return case

    return make


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beams": 2}, "`num_beams` must be 1"),
        ({"return_dict_in_generate": True, "output_attentions": True}, "`output_attentions=True` is not served"),
        ({"prompt_lookup_num_tokens": 3}, "other kinds of drafting"),
        ({"cache_implementation": "quantized"}, "Pass a DynamicCache or StaticCache|quanto|HQQ|optimum"),
    ],
)
def test_settings_are_refused_before_any_work(silent: Any, kwargs: dict[str, Any], message: str) -> None:
    case = silent()
    if kwargs.get("output_attentions"):
        case.model.set_attn_implementation("eager")
    with pytest.raises((ValueError, ImportError), match=message):
        case.lantern(case.head(), max_new_tokens=4, do_sample=False, **kwargs)


def test_caches_are_refused_before_any_work(silent: Any) -> None:
    case = silent()
    config = case.model.config
    full = DynamicCache(config=config)
    full.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
    with pytest.raises(ValueError, match=f"`{CACHE_KEYWORD}` holds 3 tokens"):
        case.lantern(case.head(), max_new_tokens=4, **{CACHE_KEYWORD: full})
    small = StaticCache(config=config, max_cache_len=12)
    with pytest.raises(ValueError, match=r"has 12 slots, but prompt, new tokens and one tree need 36"):
        case.lantern(case.head(), max_new_tokens=4, **{CACHE_KEYWORD: small})
    guided = silent(guidance=2.0)
    with pytest.raises(ValueError, match="together with guidance"):
        guided.lantern(guided.head(), max_new_tokens=4, **{CACHE_KEYWORD: StaticCache(config=config, max_cache_len=64)})
    three = silent(rows=3, guidance=2.0)
    three.inputs["negative_prompt_ids"] = three.inputs["negative_prompt_ids"][:2]
    with pytest.raises(ValueError, match="2 rows for 3 sequences"):
        three.lantern(three.head(), max_new_tokens=4)


def test_processors_that_keep_state_are_refused(silent: Any) -> None:
    from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor

    case = silent()
    processor = SynthIDTextWatermarkLogitsProcessor(2, [1, 2], 16, 8, 4, device="cpu")
    with pytest.raises(ValueError, match="keeps state between calls"):
        case.lantern(case.head(), max_new_tokens=4, logits_processor=[processor])


def test_models_are_refused_before_any_work() -> None:
    head, prompt = make_case("llama").head(), torch.tensor([[3, 4, 5]])
    kwargs = {"custom_generate": lantern_generate, "assistant": head, "lantern_config": LanternConfig.strict()}
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(ValueError, match="encoder-decoder"):
        t5.generate(prompt, max_new_tokens=2, **kwargs)
    sliding = MistralForCausalLM(
        MistralConfig(
            vocab_size=40,
            hidden_size=32,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=4,
            pad_token_id=0,
        )
    )
    for use_cache in (True, False):
        with pytest.raises(ValueError, match=r"DynamicSlidingWindowLayer|sliding_attention|does not fit"):
            sliding.generate(
                prompt, max_new_tokens=2, use_cache=use_cache, assistant=None, custom_generate=lantern_generate
            )


def test_a_prompt_of_images_and_text_is_refused() -> None:
    case = make_case("chameleon-image", 2)
    case.inputs["input_ids"][1, -1] = 40
    with pytest.raises(ValueError, match="1 of 2 prompts end inside an image"):
        case.lantern(case.head(), max_new_tokens=2)


def test_decoding_without_an_end_is_refused() -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match="would never end"):
        lantern_generate(model, torch.tensor([[3, 4]]))


def test_the_loop_alone() -> None:
    """`lantern_generate` called directly, with criteria and nothing else."""
    from transformers import MaxLengthCriteria

    model = tiny_llama()
    ids = torch.tensor([[3, 4, 5]])
    tokens = lantern_generate(model, ids, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(9)]))
    assert torch.equal(tokens, model.generate(ids, max_length=9, do_sample=False))


def test_assistants_of_the_wrong_kind() -> None:
    case = make_case("llama")
    with pytest.raises(TypeError, match="`assistant` must be a LanternDraftModel"):
        case.lantern(case.model, max_new_tokens=2)
