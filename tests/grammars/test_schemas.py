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


@pytest.mark.parametrize("seed", [1])
def test_every_schema_gives_valid_json(llm, seed):
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed + number,
            max_tokens=1900,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=number % 2 == 0),
        )
        for number, schema in enumerate(SCHEMAS)
    ]
    outputs = llm.generate([f"Fill form {number}:" for number in range(200)], params, use_tqdm=False)
    for schema, output in zip(SCHEMAS, outputs, strict=True):
        (completion,) = output.outputs
        assert completion.finish_reason == "stop", (schema, completion.error, completion.text)
        Draft202012Validator(schema).validate(json.loads(completion.text))
