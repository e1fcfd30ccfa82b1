"""What is reported of the weights over depth while a model trains."""

import math

import pytest
import torch

from modeling_k3.training.depth_stats import DepthWatch, summarise_depth
from tests.models import build, tiny_config, token_ids


def test_figures_of_one_mix_are_those_of_its_weights() -> None:
    model, ids = build(tiny_config("KM")).train(), token_ids(2, 9)
    watch = DepthWatch(model)
    p = model(ids, output_depth_weights=True).depth_weights[-1]
    report = watch.take()["model.output_attn_res_proj"]
    assert report["entropy"] == pytest.approx((-(p * p.log()).sum(-1) / math.log(p.shape[-1])).mean().item(), rel=1e-5)
    assert report["largest"] == pytest.approx(p.amax(-1).mean().item(), rel=1e-5)
    product = model.model.output_attn_res_proj.weight[0] * model.model.output_attn_res_norm.weight
    assert report["query_norm"] == pytest.approx(product.norm().item(), rel=1e-5)
    assert watch.weights["model.output_attn_res_proj"] == pytest.approx(p.flatten(0, -2).mean(0).tolist(), rel=1e-5)
    assert watch.take() == {} == watch.weights


def test_queries_at_zero_look_everywhere_alike() -> None:
    model = build(tiny_config("KM")).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_res_proj.weight"):
                parameter.zero_()
    watch = DepthWatch(model)
    model(token_ids(1, 5))
    figures = summarise_depth(watch.take())
    assert figures["depth_entropy"] == pytest.approx(1.0, abs=1e-5) and figures["depth_query_norm"] == 0


def test_padding_evaluation_and_repeated_layers_do_not_count() -> None:
    ids, reports = token_ids(1, 9), []
    for padded in (False, True):
        model = build(tiny_config("KM")).train()
        watch = DepthWatch(model)
        if padded:
            model.activation_checkpointing_enable({"use_reentrant": True})
            model.enable_input_require_grads()
            with torch.no_grad():
                model(ids)
            model.eval()(ids)
            model.train()
        x = torch.cat([torch.full((1, 20), 3), ids], dim=1) if padded else ids
        mask = (torch.arange(29) >= 20).long().unsqueeze(0) if padded else None
        model(x, attention_mask=mask, use_cache=False).logits.sum().backward()
        reports.append(watch.take())
    assert reports[0].keys() == reports[1].keys() and len(reports[0]) == 4
    for name, row in reports[0].items():
        assert row == pytest.approx(reports[1][name], abs=1e-5)
    assert DepthWatch(build(tiny_config("KM", attn_res_block_size=None))).take() == {} == summarise_depth({})
