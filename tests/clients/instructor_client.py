"""instructor: answers as pydantic models, by tools, by JSON mode and by a JSON schema."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")  # or a small model adds properties for ever

    name: str = Field(max_length=12)
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=30)


client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
ask = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Tell me of a pet."}],
    "temperature": 0,
    "max_tokens": 200,
}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    pet = instructor.from_openai(client, mode=mode).chat.completions.create(**ask, response_model=Pet, max_retries=0)
    assert isinstance(pet, Pet), mode
    print(mode, pet)
print("done")
