"""Errors of models found unfit for computation in parts by a rehearsal."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch import nn

from gpumix.engine.loss.reduction import ObjectiveWithRule
from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.engine.rehearsal.samples import all_gather_values
from gpumix.engine.trial_steps import TrialSteps
from gpumix.schema.errors import get_first_line
from gpumix.schema.job.coupled_losses import HOW_TO_COUPLE, NO_RULE

# Message of `torch.autograd.grad` if a block lies between the loss and the tensor in question.
UNUSED_GRAPH_MESSAGE = "appears to not have been used in the graph"
NOT_OF_PARTS = "the loss of a batch is not made of the losses of its parts"


def count_in_place_changes(engine: TrialSteps) -> dict[str, int]:
    """Count the in-place changes of each parameter in the model's modules, by name."""
    return {
        name: one._version
        for group in engine.groups()
        for one, name in group.names_by_parameter()
        if type(one) is nn.Parameter
    }


def make_changed_weight_error(before: dict[str, int], after: dict[str, int]) -> ModelError | None:
    """Return the error of a forward that changed a parameter between two counts, if any."""
    changed = next((name for name, version in after.items() if before[name] != version), None)
    if changed is None:
        return None
    return ModelError(
        f"the model's forward changes the values of parameter '{changed}'",
        code="forward-changes-parameter",
        why="a rank computes with a copy of a weight, which is not what is updated",
        fix="change weights between steps only, as optimizers do",
    )


def find_changed_buffers(model: nn.Module, changed: Sequence[nn.Module]) -> ModelError | None:
    """Return the error of modules whose buffers were changed by a forward in training, if any."""
    if not changed:
        return None
    module = changed[0]
    name = next(name for name, one in model.named_modules() if one is module)
    return ModelError(
        f"in training, forward changes buffers of module '{name}', a {type(module).__name__}",
        code="forward-changes-buffer",
        why="it does so for each micro-batch, so what it keeps depends on how the batch is cut",
        fix="freeze it (.eval() for batch norm), take a module without state (group or layer "
        "norm), or train by a plan that does not cut batches, as couples='batch' makes; "
        f"couples='{NO_RULE}' accepts it: all ranks then use the buffers of one of them, as under "
        "DDP",
    )


def make_few_samples_error(model: nn.Module, number: int, error: Exception) -> ModelError:
    alone = "one sample" if number == 1 else f"{number} samples"
    return ModelError(
        f"{type(model).__name__} computes more, but not {alone} alone: {get_first_line(error)}",
        code="batch-not-divisible-by-model",
        why="a batch is cut into micro-batches; what needs several samples, as norms of pictures "
        "that have come to a single pixel, cannot be cut",
        fix="give it larger pictures, take a module that computes one sample, or train by a plan "
        "that does not cut batches, as couples='batch' makes",
    )


def make_gradient_loss_error(model: nn.Module) -> ModelError:
    return ModelError(
        f"the loss of {type(model).__name__} is made of gradients by its inputs or parameters",
        code="loss-of-gradients",
        why="blocks are computed apart, each with a graph of its own, so a loss cannot be "
        "differentiated through it",
        fix="leave out the term (a gradient penalty, ...)",
    )


def make_leaked_state_error(model: nn.Module) -> ModelError:
    return ModelError(
        f"in {type(model).__name__}, what one micro-batch comes to depends on another one",
        code="micro-batches-coupled",
        why="a block is computed for all micro-batches before the next one, so what forward or a "
        "hook keeps in an attribute, for a later block or the loss, is of another micro-batch then",
        fix="hand it on as an argument, or return it; or train by a plan that does not cut batches",
    )


def make_repeat_error(model: nn.Module) -> ModelError:
    return ModelError(
        f"{type(model).__name__} comes to something else when it computes the same samples again",
        code="forward-not-repeatable",
        why="a batch is computed in several calls, so what forward or the loss counts, keeps in an "
        "attribute or draws by a generator of its own depends on how the batch is cut",
        fix="keep nothing between calls and draw by torch's own generator, or train by a plan that "
        "does not cut batches",
    )


def make_random_eval_error(model: nn.Module) -> ModelError:
    return ModelError(
        f"{type(model).__name__} draws random numbers in evaluation too",
        code="random-in-evaluation",
        why="so nobody can see whether the loss of a batch is made of the losses of its parts",
        fix=f"draw in training only (`if self.training`); {HOW_TO_COUPLE}",
    )


def make_changed_kind_error() -> ModelError:
    return ModelError(
        "the loss of a micro-batch was made in another way than in the first rehearsal, and than "
        "in one of the same samples now",
        code="loss-changed-since-rehearsal",
        why="it depends on chance, on weights or on what was computed before, so nobody can see "
        "whether it adds up",
        fix="compute the same terms in every step, with 0 for those that are left out; or train by "
        "a plan that does not cut batches",
    )


def make_unequal_weights_error(objective: ObjectiveWithRule, low: float, high: float) -> ModelError:
    """Return the error of two micro-batches whose losses are multiplied by unlike numbers."""
    rule = objective.rule
    return ModelError(
        NOT_OF_PARTS,
        code="loss-weights-unequal",
        why=f"taken for {'a mean' if rule is None else rule.name}, the terms of the losses of two "
        f"micro-batches are multiplied with unlike numbers ({low:.6g} and {high:.6g} in sum): the "
        "loss divides by a number that differs, or its terms are means over unlike numbers",
        fix=_count_or_keep_whole(objective),
    )


def make_empty_mean_error(objective: ObjectiveWithRule) -> ModelError:
    return ModelError(
        NOT_OF_PARTS,
        code="loss-mean-of-nothing",
        why="the loss of a micro-batch gave gradients to fewer rows than those before, and losses "
        "are no numbers since: it is a mean over what there was none of in the micro-batch",
        fix="let the function return a sum, and divide by the number of items outside of it, where "
        f"the graph shows the number; or {_count_or_keep_whole(objective)}",
    )


def make_clamped_count_error(objective: ObjectiveWithRule) -> ModelError:
    return ModelError(
        NOT_OF_PARTS,
        code="loss-count-clamped",
        why="the loss of a micro-batch was divided by 1, and so is that of the same samples twice: "
        "there is nothing in it that the loss counts, and of the whole batch it would be no 1",
        fix="divide by the number itself, not by 1 at least: a micro-batch without items then "
        f"counts nothing; or {_count_or_keep_whole(objective)}",
    )


def _count_or_keep_whole(objective: ObjectiveWithRule) -> str:
    return f"{objective.how_to_count}, or train by a plan that does not cut batches"


def refuse_any(engine: TrialSteps, found: ModelError | None) -> None:
    """Raise an error against the model on all ranks, if found on any. Collective."""
    words = [] if found is None else [found.what, found.code, found.why, found.fix]
    text = json.dumps(words).encode() if words else b""
    lengths = [int(length) for (length,) in all_gather_values(engine, [float(len(text))])]
    if not any(lengths):
        return
    table = all_gather_values(engine, [float(byte) for byte in text.ljust(max(lengths))])
    if found is not None:
        raise found
    first = next(rank for rank, length in enumerate(lengths) if length)
    what, code, why, fix = json.loads(bytes(map(int, table[first])))
    raise ModelError(what, code=code, where=f"rank {first}", why=why, fix=fix)
