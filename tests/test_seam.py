"""The seam to transformers: patching, switching, undoing, and what passes through."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from harness import error, free_port, spawn, tiny_model
from test_models import EXACT, average_gradients, batch_of, check, gradients, parallel, serial, step

from easy_context import (
    apply_seq_parallel_monkey_patch,
    init_seq_parallel,
    prepare_seq_parallel_inputs,
    remove_seq_parallel_monkey_patch,
    seq_parallel_loss,
    unshard_sequence,
)


def raised(fn, *args, **kwargs) -> str:
    """The text of the ValueError that `fn` raises."""
    with pytest.raises(ValueError) as caught:
        fn(*args, **kwargs)
    return str(caught.value)


def llama_logits(model, ids):
    return model(ids, position_ids=torch.arange(ids.shape[1])[None]).logits.detach()


# --- patching -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flash_attention_2", "eager", "sdpa"])
def test_any_attention_name_will_do_and_removal_restores_it(name, tmp_path):
    from transformers import LlamaForCausalLM

    reference = tiny_model()
    reference.save_pretrained(tmp_path)
    ids, _ = batch_of(16)
    truth = reference(ids).logits
    apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama")
    model = LlamaForCausalLM.from_pretrained(tmp_path, _attn_implementation=name, dtype=torch.float64)
    assert model.config._attn_implementation == "easy_context"
    assert error(llama_logits(model, ids), truth) < 1e-6
    remove_seq_parallel_monkey_patch()
    assert model.config._attn_implementation == ("sdpa" if name == "flash_attention_2" else name)
    assert error(model(ids).logits, truth) < 1e-6


def test_models_made_before_the_patch_are_patched_too():
    model, ids = tiny_model(), batch_of(16)[0]
    truth = model(ids).logits
    apply_seq_parallel_monkey_patch("dist_flash_attn", "llama")
    assert error(llama_logits(model, ids), truth) < EXACT
    assert model.config._attn_implementation == "easy_context"


def test_removal_leaves_no_trace():
    from transformers import LlamaPreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    before = dict(vars(LlamaPreTrainedModel))
    names = set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)
    model = tiny_model()
    apply_seq_parallel_monkey_patch("usp_attn", "llama")
    llama_logits(model, batch_of(8)[0])
    remove_seq_parallel_monkey_patch()
    assert dict(vars(LlamaPreTrainedModel)) == before
    assert (set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)) == names
    assert not model.model._forward_pre_hooks
    apply_seq_parallel_monkey_patch("usp_attn", model)
    remove_seq_parallel_monkey_patch()
    assert not model._forward_pre_hooks and not model.model._forward_pre_hooks
    generated = model.generate(batch_of(8)[0], max_new_tokens=2, do_sample=False)
    assert generated.shape == (2, 10)


def test_a_model_object_is_patched_alone():
    patched, other, ids = tiny_model(), tiny_model(), batch_of(12)[0]
    report = apply_seq_parallel_monkey_patch("ulysses_attn", patched)
    assert "ulysses_attn" in report and "LlamaModel" in report
    assert error(llama_logits(patched, ids), llama_logits(other, ids)) < EXACT
    assert patched.config._attn_implementation == "easy_context"
    assert other.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("by", ["family", "object"])
def test_copies_stay_patched_until_removal(by, tmp_path):
    model, ids = tiny_model(), batch_of(12)[0]
    truth = model(ids).logits
    apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama" if by == "family" else model)
    llama_logits(model, ids)
    torch.save(model, tmp_path / "model.pt")
    copies = [copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)]
    for copied in copies:
        assert error(llama_logits(copied, ids), truth) < EXACT
        assert len(copied.model._forward_pre_hooks) == 1
    remove_seq_parallel_monkey_patch()
    for copied in copies:
        assert error(copied(ids).logits, truth) < EXACT
        assert copied.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("by", ["family", "object"])
def test_a_copy_first_called_after_removal_is_refused_until_it_is_patched_or_removed_too(by):
    model, ids = tiny_model(), batch_of(12)[0]
    truth = model(ids).logits
    apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama" if by == "family" else model)
    llama_logits(model, ids)
    copies = [copy.deepcopy(model), copy.deepcopy(model)]
    remove_seq_parallel_monkey_patch()
    for copied in copies:
        assert "not in force" in raised(copied, ids)
    apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama" if by == "family" else copies[0])
    assert error(llama_logits(copies[0], ids), truth) < EXACT
    remove_seq_parallel_monkey_patch()
    assert all(error(copied(ids).logits, truth) < EXACT for copied in copies)


def test_copies_of_a_model_that_was_never_called_are_restored():
    """As a reference model that is copied right after loading."""
    apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama")
    copied = copy.deepcopy(tiny_model())
    truth, ids = copied(batch_of(12)[0]).logits, batch_of(12)[0]
    remove_seq_parallel_monkey_patch()
    assert copied.config._attn_implementation == "sdpa"
    assert error(copied(ids).logits, truth) < EXACT


def test_saving_a_patched_model_saves_no_patch(tmp_path):
    apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama")
    tiny_model().save_pretrained(tmp_path)
    assert "easy_context" not in (tmp_path / "config.json").read_text()


def test_unknown_names_are_refused():
    assert "zigzag_ring_attn" in raised(apply_seq_parallel_monkey_patch, "ring", "llama")
    assert "no model family" in raised(apply_seq_parallel_monkey_patch, "zigzag_ring_attn", "lama")
    assert "attention interface" in raised(apply_seq_parallel_monkey_patch, "zigzag_ring_attn", "rwkv")
    assert "cudnn" in raised(apply_seq_parallel_monkey_patch, "zigzag_ring_attn", "llama", kernel="fast")
    assert "transformers model" in raised(apply_seq_parallel_monkey_patch, "zigzag_ring_attn", torch.nn.Linear(2, 2))


# --- the published snippet, switching, third parties ---------------------------------------------------------------


def snippet(rank, world, path, ids, targets):
    from transformers import LlamaForCausalLM

    apply_seq_parallel_monkey_patch("dist_flash_attn", "llama")
    model = LlamaForCausalLM.from_pretrained(path, _attn_implementation="flash_attention_2")
    prepared = prepare_seq_parallel_inputs("dist_flash_attn", ids, None, targets, rank, world, "cpu")
    logits = model(prepared["local_input_ids"], position_ids=prepared["local_position_ids"]).logits
    return unshard_sequence("dist_flash_attn", logits.detach(), length=ids.shape[1])


def test_the_published_snippet_runs_as_written(tmp_path):
    model = tiny_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    ids, targets = batch_of(30)
    truth = model(ids).logits
    for logits in spawn(snippet, 2, str(tmp_path), ids, targets):
        assert error(logits, truth) < 1e-5


def switching(rank, world, ids, targets):
    model = tiny_model().train()
    losses = []
    for mode in ("zigzag_ring_attn", "ulysses_attn", "dist_flash_attn", "usp_attn"):
        apply_seq_parallel_monkey_patch(mode, "llama")
        model.zero_grad()
        losses.append(step(model, mode, ids, targets, rank, world))
    return losses


def test_applying_again_switches_the_mode():
    ids, targets = batch_of(25)
    truth = serial("llama", ids, targets)
    for per_rank in zip(*spawn(switching, 2, ids, targets), strict=True):
        check(per_rank, truth, EXACT)


def third_party(rank, world, ids, targets):
    """A mode of somebody else's: gather all keys and values, attend with the plain definition."""
    from easy_context import register_mode
    from easy_context.agreement import gather
    from easy_context.layout import Layout
    from easy_context.modes import Mode

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t, group):
            ctx.group = group
            return torch.cat(gather(group, t), 1)

        @staticmethod
        def backward(ctx, grad):
            dist.all_reduce(grad, group=ctx.group)
            return grad.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)], None

    class AllGatherAttention(Mode):
        name = "all_gather_attn"

        def layout(self, sp_size, ring_degree=None):
            return Layout(ring=sp_size)

        def attention(self, q, k, v, ctx):
            k, v = (Gathered.apply(t, ctx.sequence.group).repeat_interleave(2, 2) for t in (k, v))
            own = ctx.layout.indices(ctx.seq_len, ctx.sequence.rank)
            visible = torch.arange(ctx.seq_len)[None, :] <= own[:, None]
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * ctx.scale
            return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)

    register_mode(AllGatherAttention())
    return parallel(rank, world, "all_gather_attn", "llama", ids, targets, None, {})


def test_a_third_party_adds_a_mode():
    ids, targets = batch_of(22)
    check(spawn(third_party, 3, ids, targets), serial("llama", ids, targets), EXACT)


# --- recomputation, documents, splits -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["zigzag_ring_attn", "usp_attn"])
def test_recomputation(mode):
    ids, targets = batch_of(25)
    results = spawn(parallel, 2, mode, "llama", ids, targets, None, {}, True)
    check(results, serial("llama", ids, targets), EXACT)


def packed(rank, world, mode, ids, targets, positions, use_mask):
    apply_seq_parallel_monkey_patch(mode, "llama")
    model = tiny_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    local = prepare_seq_parallel_inputs(mode, ids, positions, targets, rank, world, "cpu")
    mask = torch.ones_like(local["local_input_ids"]) if use_mask else None
    out = model(local["local_input_ids"], attention_mask=mask, position_ids=local["local_position_ids"])
    # another forward with other documents before the backward: recomputation must keep the first one's
    model(
        local["local_input_ids"],
        position_ids=prepare_seq_parallel_inputs(mode, ids, None, None, rank, world, "cpu")["local_position_ids"],
    )
    loss, reported = seq_parallel_loss(out.logits, local["local_target_ids"])
    loss.backward()
    average_gradients(model, world)
    return reported.item(), unshard_sequence(mode, out.logits.detach(), length=ids.shape[1]), gradients(model)


@pytest.mark.parametrize("use_mask", [False, True])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("mode", ["zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "usp_attn"])
def test_packed_documents_equal_the_documents_alone(mode, world, use_mask):
    ids, targets = batch_of(45)
    borders = [(0, 3, 4, 30, 45), (0, 20, 45)]
    positions = torch.stack([torch.cat([torch.arange(b - a) for a, b in pairwise(row)]) for row in borders])
    for row, edges in enumerate(borders):
        targets[row, [edge - 1 for edge in edges[1:]]] = -100
    model = tiny_model().train()
    logits = torch.stack(
        [
            torch.cat([model(ids[row : row + 1, a:b]).logits[0] for a, b in pairwise(edges)])
            for row, edges in enumerate(borders)
        ]
    )
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    truth = loss.item(), logits.detach(), gradients(model)
    check(spawn(packed, world, mode, ids, targets, positions, use_mask), truth, EXACT)


def two_by_two(rank, world, ids, targets):
    mesh = init_seq_parallel(seq_parallel_size=2)
    assert (mesh.data_size, mesh.sp_size) == (2, 2)
    apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama")
    model = tiny_model().train()
    own = slice(mesh.data_rank, mesh.data_rank + 1)
    reported, logits, grads = step(model, "zigzag_ring_attn", ids[own], targets[own], rank, world)
    both = [torch.empty_like(logits) for _ in range(world)]
    dist.all_gather(both, logits)
    return reported, torch.cat([both[0], both[2]]), grads


def test_two_groups_of_two():
    ids, targets = batch_of(29, ignored=[(0, 0, 25)])
    check(spawn(two_by_two, 4, ids, targets), serial("llama", ids, targets), EXACT)


def restarted(rank, world, ids, targets, port):
    apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama")
    model = tiny_model().train()
    init_seq_parallel(world, world)
    step(model, "zigzag_ring_attn", ids, targets, rank, world)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    model.zero_grad()
    return step(model, "zigzag_ring_attn", ids, targets, rank, world)


def test_groups_are_built_anew_after_a_restart_of_torch_distributed():
    ids, targets = batch_of(16)
    check(spawn(restarted, 2, ids, targets, free_port()), serial("llama", ids, targets), EXACT)


def test_a_length_shorter_than_the_world():
    ids, targets = batch_of(3)
    check(spawn(parallel, 4, "zigzag_ring_attn", "llama", ids, targets, None, {}), serial("llama", ids, targets), EXACT)


def two_models(rank, world, ids, targets):
    """A model of 4 heads and one of 6 take turns in one process."""
    apply_seq_parallel_monkey_patch("ulysses_attn", "llama")
    apply_seq_parallel_monkey_patch("zigzag_ring_attn", "qwen2")
    first, second = tiny_model().train(), tiny_model("qwen2", num_attention_heads=6, num_key_value_heads=3).train()
    step(first, "ulysses_attn", ids, targets, rank, world)
    other = step(second, "zigzag_ring_attn", ids, targets, rank, world)
    first.zero_grad()
    return step(first, "ulysses_attn", ids, targets, rank, world), other


def test_different_models_and_modes_in_one_process():
    ids, targets = batch_of(26)
    first, second = zip(*spawn(two_models, 2, ids, targets), strict=True)
    check(first, serial("llama", ids, targets), EXACT)
    check(second, serial("qwen2", ids, targets, num_attention_heads=6, num_key_value_heads=3), EXACT)


def compiled(rank, world, ids, targets):
    apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama")
    model = torch.compile(tiny_model().train(), backend="aot_eager")
    reported, logits, grads = step(model, "zigzag_ring_attn", ids, targets, rank, world)
    return reported, logits, {name.removeprefix("_orig_mod."): grad for name, grad in grads.items()}


def test_a_compiled_model_is_exact():
    ids, targets = batch_of(26)
    check(spawn(compiled, 2, ids, targets), serial("llama", ids, targets), EXACT)


@pytest.mark.parametrize("mode", ["zigzag_ring_attn", "dist_flash_attn", "ulysses_attn", "usp_attn"])
def test_one_process_takes_any_length(mode):
    model, ids = tiny_model(), batch_of(25)[0]
    truth = model(ids).logits
    apply_seq_parallel_monkey_patch(mode, model)
    assert error(model(ids).logits, truth) < EXACT
