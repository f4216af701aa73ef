"""A model whose weights FSDP2 has spread over processes: every forward pass is a message that all of them wait for.

So all processes must make the same number of passes, and what only some of them do (generate until their own completions
end, score held-out problems) needs the whole weights first (`whole_weights`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from kit.errors import EnvironmentUnsupported, ObjectiveError

UNPROVEN = {"full_kl", "teacher_kl", "teacher_logps", "values", "weight_norm"}
"""What a hook may need that reads weights outside of a forward pass, where a process holds a part of them."""

MARK = "_is_fsdp_managed_module"
"""What torch notes in a module that FSDP2 has taken."""


def parts_of(model: Any) -> list[FSDPModule]:
    """The modules that FSDP2 gathers one at a time; none where it has not taken the model."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def groups_of(part: FSDPModule) -> list[Any]:
    """The parameter groups of such a module, none or more. torch 2.11 has one at most, under a name of its own."""
    state: Any = part._get_fsdp_state()
    if (groups := getattr(state, "_fsdp_param_groups", None)) is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def own_weights(model: Any) -> list[Tensor]:
    """The weights as this process keeps them. Where a module is gathered, `parameters()` gives other tensors for a while."""
    parts = parts_of(model)
    if not parts:
        return list(model.parameters())
    groups = {id(group): group for part in parts for group in groups_of(part)}  # modules may share one
    return [weight.sharded_param for group in groups.values() for weight in group.fsdp_params]


def gather_head(model: Any) -> None:
    """Gathers the language-model head until the next backward pass. Every process calls it.

    TRL's fused head reads the weight without calling the module, so that FSDP2 does not see it used. TRL would gather it by
    itself, but then every process keeps the gradient of its own completions alone for its part of a trained head.
    """
    head = model.get_output_embeddings()
    if isinstance(head, FSDPModule):
        _begin(model)
        head.unshard()


@contextmanager
def whole_weights(model: Any) -> Iterator[None]:
    """Inside, every process holds all weights, and its passes wait for nobody. Every process enters and leaves it."""
    parts = parts_of(model)
    if not parts:
        yield
        return
    _begin(model)
    with ExitStack() as after:
        for part in parts:
            for group in groups_of(part):
                after.callback(setattr, group, "post_forward_mesh_info", group.post_forward_mesh_info)
                group.post_forward_mesh_info = None  # a pass keeps them
            part.unshard()
            after.callback(part.reshard)
        for module in model.modules():
            if vars(module).get(MARK):  # transformers' generate would ask the others for every token whether they go on
                setattr(module, MARK, False)
                after.callback(setattr, module, MARK, True)
        yield


def _begin(model: Any) -> None:
    """Lets the whole model be FSDP2's root: that is otherwise the first module that runs."""
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()


def check_sharded(trainer: Any) -> None:
    """Refuses what was not proven with weights that are spread over processes, and lets checkpoints hold whole weights.

    Raises `ObjectiveError` for what a hook needs, `EnvironmentUnsupported` for FSDP's first version.
    """
    if not trainer.is_fsdp_enabled:
        return
    plugin = trainer.accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise EnvironmentUnsupported(
            "FSDP's first version was never held against one process here. Use the second: accelerate launch --fsdp_version 2 "
            '(in Python: fsdp_config={"version": 2}).'
        )
    if trainer.use_vllm:
        raise EnvironmentUnsupported(
            "vLLM beside weights that FSDP has spread over processes was never run here. Set generation.engine: hf, or start "
            "with accelerate launch --multi_gpu (each process holds the whole model)."
        )
    if getattr(trainer, "ref_model", None) is not None:
        raise ObjectiveError(
            "The objective needs a reference policy, and with all weights trained that is a second model, which FSDP would "
            "spread over the processes as well; no run of it was held against one process. Leave the KL out, train an adapter, "
            "or start with accelerate launch --multi_gpu (each process holds the whole model)."
        )
    if found := sorted(trainer.needs & UNPROVEN):
        raise ObjectiveError(
            f"The objective needs {', '.join(found)}, read from weights that FSDP has spread over the processes; no run of it "
            "was held against one process. Start with accelerate launch --multi_gpu (each process holds the whole model)."
        )
    plugin.set_state_dict_type("FULL_STATE_DICT")
