"""Whatever the schema asks for, the JSON that comes out is valid: 200 schemas, at temperature 1."""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator

from frame import SamplingParams, StructuredOutputsParams
from tests.grammars.schemas import SCHEMAS


def test_there_are_200_schemas_of_their_own():
    assert len(SCHEMAS) == len({json.dumps(schema) for schema in SCHEMAS}) == 200
    for schema in SCHEMAS:
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "30 properties"])
def test_every_schema_gives_valid_json(llm, wide):
    """Those of very many properties take more steps than all others together."""
    numbered = [(n, schema) for n, schema in enumerate(SCHEMAS) if (len(schema.get("properties", ())) > 20) == wide]
    assert numbered
    params = [
        SamplingParams(
            temperature=1.0,
            seed=4001 + number,
            max_tokens=1900,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=number % 2 == 0),
        )
        for number, schema in numbered
    ]
    outputs = llm.generate([f"Fill form {number}:" for number, _ in numbered], params, use_tqdm=False)
    for (_, schema), output in zip(numbered, outputs, strict=True):
        (completion,) = output.outputs
        assert completion.finish_reason == "stop", (schema, completion.error, completion.text)
        Draft202012Validator(schema).validate(json.loads(completion.text))
