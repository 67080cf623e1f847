"""How a model makes logits is measured on the model: keys of a config do not say."""

from __future__ import annotations

import pytest
import torch

from qwengyre.core.errors import UnsupportedModel
from qwengyre.models.head import HeadForm, measure
from qwengyre.testing.families import tiny_model

TOKENS = torch.tensor([3, 14, 15, 9])


@pytest.mark.parametrize(
    "family, changes, form",
    [
        ("llama", {}, HeadForm()),
        ("granite", {"logits_scaling": 8.0}, HeadForm(1 / 8)),
        ("hyperclovax", {"logits_scaling": 8.0}, HeadForm(8.0)),
        ("cohere2", {"logit_scale": 0.0625}, HeadForm(0.0625)),
        ("gemma2", {"final_logit_softcapping": 0.5}, HeadForm(1.0, 0.5)),
        ("minicpm3", {"hidden_size": 32, "dim_model_base": 8}, HeadForm(1 / 4)),
    ],
)
def test_scales_and_caps_are_found_wherever_the_model_applies_them(family, changes, form):
    measured, body = measure(tiny_model(family, **changes), TOKENS)
    assert measured == form
    assert type(body).__name__.endswith("Model")


def test_an_output_layer_that_does_more_than_its_matrix_is_refused():
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda module, args, result: result + result.roll(1, -1))
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM .* more than to multiply"):
        measure(model, TOKENS)


def test_logits_that_are_not_a_bent_product_are_refused():
    model = tiny_model("llama")
    model.register_forward_hook(lambda module, args, result: type(result)(logits=result.logits.sin()))
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM .* not a scaled or capped product"):
        measure(model, TOKENS)


def test_bent_logits_and_their_slope_are_those_of_autograd():
    form, products = HeadForm(0.5, cap=2.0), torch.linspace(-9, 9, 12, dtype=torch.float64).view(3, 4)
    bias = torch.arange(4.0, dtype=torch.float64)
    bent = (0.5 * products + bias).requires_grad_()
    logits = 2.0 * torch.tanh(bent / 2.0)
    logits.sum().backward()
    torch.testing.assert_close(form.bend(products.clone(), bias), logits.detach())
    torch.testing.assert_close(form.slope(logits.detach()), bent.grad)
