"""Where the head writes: into places that its row holds, and there are enough of them."""

import pytest
import torch

from tests.mtp_model import mtp_model
from tests.tiny_llm import greedy, open_tiny
from tiercel.models.decoder import Decoder


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_the_head_writes_into_blocks_of_its_own_row_alone(monkeypatch, tmp_path, overlap):
    """Also for a row that does not draft, for whose drafts no block is reserved."""
    monkeypatch.setenv("TIERCEL_OVERLAP", overlap)
    monkeypatch.setattr(Decoder, "block_size", 16)
    with open_tiny(
        mtp_model(tmp_path / "mtp.gguf"), spec="mtp", num_spec_tokens=7, max_num_seqs=3
    ) as llm:
        engine, head = llm._engine, llm._engine.runner.model.draft_head
        # The last one gets the row of the first, whose table still holds the blocks of that one.
        params = [greedy(2), greedy(40), greedy(40), greedy(40, num_spec_tokens=0)]
        prompts = [[5] * 60, [7, 8, 9] * 5, [10, 11] * 7, [12] * 13]
        requests = [
            llm._inputs.request(ids, own, 0) for ids, own in zip(prompts, params, strict=True)
        ]
        forward, wrong, num_seen = head.forward, [], 0

        def watched(batch, hidden):
            nonlocal num_seen
            by_row = {request.row: request for request in requests}
            counts = torch.tensor(batch.query_lens)
            rows = batch.rows.repeat_interleave(counts).tolist()
            positions, slots = batch.positions.tolist(), batch.slot_mapping[0].tolist()
            for row, position, slot in zip(rows, positions, slots, strict=True):
                held = by_row[row].block_ids[0] if slot >= 0 else ()
                number = position // 16
                own = held[number] * 16 + position % 16 if number < len(held) else None
                num_seen += slot >= 0
                if slot >= 0 and slot != own:
                    wrong.append((requests.index(by_row[row]), position, slot))
            return forward(batch, hidden)

        monkeypatch.setattr(head, "forward", watched)
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            engine.step()
    assert not wrong
    assert num_seen > 300


def test_a_window_has_room_for_the_drafts_behind_a_prompt(monkeypatch, tmp_path):
    """A chunk that fills a step, and after it what the head writes for 15 drafts."""
    monkeypatch.setenv("TIERCEL_PREFIX_CACHE", "0")
    monkeypatch.setattr(Decoder, "block_size", 16)
    path = mtp_model(tmp_path / "mtp.gguf", arch="gemma3")
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 42, "max_model_len": 128}
    with open_tiny(path, spec="mtp", num_spec_tokens=15, **sizes) as llm:
        engine = llm._engine
        request = llm._inputs.request([7] * 84, greedy(20), 0)
        engine.submit(request)
        for _ in range(2 + 20):  # two chunks, and no more steps than tokens
            if engine.has_work:
                engine.step()
        assert len(request.output_token_ids) == 20
        assert engine.scheduler.num_preemptions == 0
