"""What warming up leaves behind: nothing but compiled code."""

from tests.tiny_llm import assert_idle, greedy, open_tiny
from tiercel.engine.warm_up import warm_up


def test_nothing_is_kept_and_nothing_is_counted():
    prompt = {"prompt_token_ids": [i % 270 for i in range(90)]}  # begins like a warm-up prompt
    with open_tiny() as llm:
        (expected,) = llm.generate(prompt, greedy(8))
    with open_tiny() as llm:
        engine = llm._engine
        warm_up(engine, llm.source.config.vocab_size)
        assert_idle(llm)
        scheduler = engine.scheduler
        assert (scheduler.num_preemptions, scheduler.prefix_queries) == (0, 0)
        assert all(allocator.num_idle == 0 for allocator in scheduler.cache.allocators)
        (output,) = llm.generate(prompt, greedy(8))
    assert output.metrics.num_cached_tokens == 0
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_every_stage_of_the_sampler_runs():
    with open_tiny() as llm:
        sampler, ran = llm._engine.runner.sampler, set()
        for name in ("_process", "_cut", "_ban"):
            real = getattr(sampler, name)

            def watched(*arguments, real=real, name=name):
                ran.add(name)
                return real(*arguments)

            setattr(sampler, name, watched)
        warm_up(llm._engine, llm.source.config.vocab_size)
    assert ran == {"_process", "_cut", "_ban"}


def test_a_short_context_is_warmed_up_with_what_fits():
    with open_tiny(max_model_len=6) as llm:
        warm_up(llm._engine, llm.source.config.vocab_size)
        assert_idle(llm)
