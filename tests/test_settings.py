"""Settings: unknown and out-of-range values name field, value and bound."""

import typing

import pytest
from pydantic import ValidationError

from serve_app import app
from serve_app.config import ControlConfig, EnginePolicy, FairwayServeConfig, PrefillTable, RoutingWeights
from serve_app.settings import Settings

TABLE = {"device": "d", "model": "m", "dtype": "bf16", "vllm_version": "0.29.0", "date": "2026-11-30"}


def test_defaults_are_valid() -> None:
    assert FairwayServeConfig().engine.policy.ordering == "fairway-carried"
    assert ControlConfig().token is None


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"engin": {}}, "engin"),
        ({"engine": {"policy": {"fast_weight": 0.5}}}, r"engine.policy.fast_weight\s.*greater than or equal to 1"),
        ({"router": {"routing": {"weights": {"queue": 0}}}}, r"queue\s.*greater than 0.*input_value=0"),
        ({"router": {"routing": {"router": "nearest"}}}, r"router\s.*'lbgr', 'round-robin', .* or 'lbgr-published'"),
        ({"replicas": {"min": 5, "max": 2}}, "replicas.min is 5 and replicas.max 2"),
        ({"engine": {"policy": {"eviction": "fifo"}}}, r"eviction\s.*'adaptive', 'rlt' or 'lru'"),
    ],
)
def test_bad_setting_names_field_value_and_bound(bad: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){says}"):
        FairwayServeConfig.model_validate(bad)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [((1, 2), (0.1,)), ((2, 1), (0.1, 0.2)), ((1, 2), (0.2, 0.1)), ((0, 2), (0.1, 0.2))]
)
def test_prefill_table_must_rise(tokens: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError):
        PrefillTable.model_validate({**TABLE, "tokens": tokens, "seconds": seconds})


def test_settings_can_not_be_changed_in_place() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RoutingWeights().queue = 2.0


def _models(model: type[Settings], seen: set[type[Settings]]) -> set[type[Settings]]:
    seen.add(model)
    for field in model.model_fields.values():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Settings) and inner not in seen:
            _models(inner, seen)
    return seen


def test_every_leaf_setting_is_described() -> None:
    models: set[type[Settings]] = {EnginePolicy, PrefillTable}
    for root in (FairwayServeConfig, ControlConfig):
        _models(root, models)
    bare = [
        f"{model.__name__}.{name}"
        for model in models
        for name, field in model.model_fields.items()
        if field.description is None
        and not (isinstance(field.annotation, type) and issubclass(field.annotation, Settings))
    ]
    assert bare == []


def test_builders_take_one_typed_argument_that_serve_can_validate() -> None:
    for builder, model in ((app.build, FairwayServeConfig), (app.build_control, ControlConfig)):
        hints = {name: hint for name, hint in builder.__annotations__.items() if name != "return"}
        assert list(hints.values()) == [model], f"{builder.__name__} must hold the class itself, not a string"
        assert typing.get_type_hints(builder)["config"] is model
