"""Reasoning is separated from the content and from calls."""

import pytest

from pipeline.text.formats.tool_parsers.harmony import MARKS as HARMONY
from pipeline.text.formats.tool_parsers.muse_glimmer import MARKS as MUSE
from tests.text.formats.calls import KIMI, MUSE_NEXT, gemma, kimi, muse
from tests.text.formats.replies import NAMES, Reply, formats, read, specials_of

HIDDEN_GEMMA = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>", "<turn|>")


@pytest.mark.parametrize(
    ("form", "tail", "text", "reply"),
    [
        ("glm45", "<|assistant|>", "\n<think>Hm.</think>\nYes.", Reply("Yes.", "Hm.")),
        ("glm45", "<|assistant|>\n<think></think>", "\nYes.", Reply("\nYes.")),
        ("glm45", "<|assistant|></think>", "Yes.", Reply("Yes.")),
        ("glm45", "<|assistant|><think>", "Hm.</think>Yes.", Reply("Yes.", "Hm.")),
        ("deepseek_v3", "<｜Assistant｜><think>", "Hm.</think>Yes.", Reply("Yes.", "Hm.")),
        ("deepseek_v3", "<｜Assistant｜></think>", "Yes.", Reply("Yes.")),
        ("deepseek_v3", "<｜Assistant｜><think></think>", "Yes.", Reply("Yes.")),
        ("granite", "", "Here is my thought process: Hm.\nHere is my response: Yes.", Reply(" Yes.", " Hm.")),
        ("granite", "", "Here's my thought process:\nHm. Here's my response:\nYes.", Reply("Yes.", "Hm. ")),
        ("granite", "", "<think>Hm.</think>\n<response>Yes.</response>", Reply("Yes.", "Hm.")),
        ("granite", "", "Here is my answer. <response>", Reply("Here is my answer. <response>")),
        ("apertus", "<|assistant_start|>", "<|inner_prefix|>Hm.<|inner_suffix|>Yes.", Reply("Yes.", "Hm.")),
        ("seed_oss", "", "<seed:think>Hm.</seed:think>Yes.", Reply("Yes.", "Hm.")),
        ("kimi_k2", "<|im_middle|>", "<think>Hm.</think>Yes.", Reply("Yes.", "Hm.")),
        ("gemma4", "<|turn>model\n", "<|channel>thought\nHm.\n<channel|>Yes.", Reply("Yes.", "Hm.")),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "Yes.", Reply("Yes.")),
        ("openai_gptoss", "<|start|>assistant", "<|channel|>analysis<|message|>Hm.", Reply("", "Hm.")),
        (
            "openai_gptoss",
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
            Reply("Yes.", "Hm."),
        ),
        ("openai_gptoss", "<|start|>assistant<|channel|>final<|message|>Y", "es.", Reply("es.")),
        ("openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>H", "m.<|end|>", Reply("", "m.")),
        ("ernie45", "<think>\n", "Hm.\n</think>\n\n<response>\nYes.\n</response>\n", Reply("Yes.\n", "Hm.")),
        ("ernie45", "<think>\n", "Hm.\n</think>\nYes.", Reply("Yes.", "Hm.")),
        ("muse_glimmer", "<|start|>assistant", " to=self<|message|>Hm.", Reply("", "Hm.")),
        (
            "muse_glimmer",
            "<|start|>assistant",
            " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>",
            Reply("Yes.", "Hm."),
        ),
        ("muse_glimmer", "<|start|>assistant to=user<|message|>Y", "es.<|eot|>", Reply("es.")),
        ("muse_glimmer", "<|start|>assistant to=self<|message|>H", "m.<|eom|>", Reply("", "m.")),
    ],
)
def test_reasoning_is_separated_from_the_content(form: str, tail: str, text: str, reply: Reply) -> None:
    specials = {"gemma4": HIDDEN_GEMMA, "openai_gptoss": HARMONY, "muse_glimmer": MUSE}.get(form, ())
    for known in (formats(reasoning=form), formats(reasoning=form, specials=specials)):
        assert read(known.parser(tail=tail), [text]) == reply
        assert read(known.parser(tail=tail), text) == reply


def test_apertus_calls_within_its_reasoning() -> None:
    form = formats(
        "apertus", "apertus", ("<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>")
    )
    text = '<|inner_prefix|>I look.<|tools_prefix|>[{"now": {}}]'
    for end in ("", "<|tools_suffix|>"):
        for pieces in ([text + end], text + end):
            reply = read(form.parser("auto", NAMES, "<|assistant_start|>"), pieces)
            assert reply == Reply("", "I look.", [("now", "{}")], 1)


def test_a_call_ends_kimis_reasoning() -> None:
    form = formats("kimi_k2", "kimi_k2", KIMI)
    reply = read(form.parser("auto", NAMES, "<|im_middle|>"), f"<think>I look.{kimi(('now', '{}'))}")
    assert reply == Reply("", "I look.", [("now", "{}")], 1)


def test_gpt_oss_reasons_again_before_a_call() -> None:
    text = (
        "<|channel|>analysis<|message|>First.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Second.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.find <|constrain|>json<|message|>{"n": 1}<|call|>'
    )
    form = formats("openai", "openai_gptoss", HARMONY)
    expected = Reply("I look.", "First.\nSecond.", [("find", '{"n": 1}')], 1)
    assert read(form.parser("auto", NAMES, "<|start|>assistant"), [text]) == expected
    assert read(form.parser("auto", NAMES, "<|start|>assistant"), text) == expected
    # Without tools, a call is content. Without a reasoning parser, so is the reasoning.
    assert read(form.parser("none", (), "<|start|>assistant"), text).content == 'I look.\n{"n": 1}'
    plain = formats("openai", specials=HARMONY)
    assert read(plain.parser("auto", NAMES), text) == Reply("First.\nI look.\nSecond.", "", [("find", '{"n": 1}')], 1)


def test_muse_glimmer_reasons_again_before_a_call() -> None:
    text = (
        f" to=self<|message|>First.{MUSE_NEXT} to=user<|message|>I look.{MUSE_NEXT}"
        f" to=self<|message|>Second.{MUSE_NEXT}"
        f"{muse('find', n='1')}<|eot|>"
    )
    form = formats("muse_glimmer", "muse_glimmer", MUSE)
    expected = Reply("I look.", "First.\nSecond.", [("find", '{"n": 1}')], 1)
    assert read(form.parser("auto", NAMES, "<|start|>assistant"), [text]) == expected
    assert read(form.parser("auto", NAMES, "<|start|>assistant"), text) == expected
    # Without tools, a call is content. Without a reasoning parser, so is the reasoning.
    called = muse("find", n="1").partition("|>")[2].replace("<atem:function_calls>", "")
    assert read(form.parser("none", (), "<|start|>assistant"), text).content == (
        "I look.\n" + called.replace("</atem:function_calls>", "")
    )
    plain = formats("muse_glimmer", specials=MUSE)
    assert read(plain.parser("auto", NAMES), text) == Reply("First.\nI look.\nSecond.", "", [("find", '{"n": 1}')], 1)


def test_a_cut_call_of_muse_glimmer_has_no_end() -> None:
    whole = muse("find", text="a", n="5")
    for end in range(whole.index("<atem:parameter") + 1, whole.index("</atem:invoke>")):
        for specials in ((), MUSE):
            reply = read(formats("muse_glimmer", "muse_glimmer", specials).parser("auto", NAMES), [whole[:end]])
            assert (reply.content, reply.num_ended) == ("", 0)
            assert '{"text": "a", "n": 5'.startswith("".join(arguments for _, arguments in reply.calls))


def test_special_tokens_of_gpt_oss_and_gemma_are_not_shown() -> None:
    gpt_oss = formats("openai", "openai_gptoss", (*HARMONY, "<|endoftext|>"))
    assert gpt_oss.needs_specials("none")
    text = "<|channel|>final<|message|>Yes.<|endoftext|><|return|>"
    assert read(gpt_oss.parser("none", tail="<|start|>assistant"), text, specials_of(gpt_oss)) == Reply("Yes.")
    gemma4 = formats("gemma4", "gemma4", HIDDEN_GEMMA)
    assert read(gemma4.parser("auto", NAMES, "model\n"), f"{gemma('n:1')}<|tool_response>") == Reply(
        calls=[("find", '{"n": 1}')], num_ended=1
    )
