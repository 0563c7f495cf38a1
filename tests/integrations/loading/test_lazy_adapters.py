"""Each kind of adapter that PEFT has, on a model whose weights stay in files, begins as on one that
is loaded, or is refused."""

from __future__ import annotations

import pytest
import torch

import gpumix
from gpumix.engine.sharding.initial_weights import check_has_values, make_source
from gpumix.engine.weights.file_parameter import has_source
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.extended import left_out

peft = pytest.importorskip("peft")

from helpers.training.adapter_kinds import SEED, list_kinds, make_base, make_config  # noqa: E402

KINDS = [kind for kind in list_kinds() if kind != "XLORA"]  # it loads adapters of its own
USUAL = ("LORA", "IA3", "DEFT", "DELORA", "SHIRA", "PSOFT", "LN_TUNING", "CPT", "PREFIX_TUNING")
# They begin with the embedding, or put what they draw where the model is.
REFUSED = {
    "ADAPTION_PROMPT", "CARTRIDGE", "CPT", "FROD", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING",
    "PROMPT_TUNING", "P_TUNING", "SHADOW", "UNILORA",
}  # fmt: skip
READING = {"CPT", "FROD"}  # they read values of the model
OF_BERT = {"TRAINABLE_TOKENS"}  # its embedding is tied to its head


@pytest.fixture(scope="module", params=["llama", "bert"])
def saved(request, tmp_path_factory):
    torch.manual_seed(1)
    model = make_base("LORA", request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return request.param, type(model), folder


def adapt(model, kind, name):
    torch.manual_seed(SEED)
    return peft.get_peft_model(model, make_config(kind, name))


@pytest.mark.parametrize("kind", left_out(KINDS, [kind for kind in KINDS if kind not in USUAL]))
def test_a_kind_begins_as_in_stock_or_is_refused(saved, kind):
    name, cls, folder = saved
    try:
        stock = adapt(cls.from_pretrained(folder), kind, name)
    except Exception as error:
        pytest.skip(f"PEFT does not make it: {error}")
    lazy = gpumix.from_pretrained(folder, cls)
    if kind in REFUSED or (name == "bert" and kind in OF_BERT):
        code = "values-still-in-files" if kind in READING else "meta-without-values"
        with raises(InputError, code=code):
            check_has_values(adapt(lazy, kind, name))
        return
    lazy = adapt(lazy, kind, name)
    check_has_values(lazy)
    source = make_source(lazy)
    for (expected_name, expected), (found_name, found) in zip(
        stock.named_parameters(), lazy.named_parameters(), strict=True
    ):
        assert (found_name, found.requires_grad) == (expected_name, expected.requires_grad)
        with torch.no_grad():
            values = source(found_name, found, 0, found.numel())
        assert torch.equal(values.view(found.shape), expected), found_name
    for (_, expected), (buffer, found) in zip(
        stock.named_buffers(), lazy.named_buffers(), strict=True
    ):
        assert torch.equal(found, expected), buffer
    assert sum(map(has_source, lazy.parameters())) > 5
