// The @anthropic-ai/sdk package: messages, streams, tools, models, and errors of its own shape.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "How is the weather in Rome?" }];
const tool = {
  name: "get_weather",
  input_schema: {
    type: "object",
    properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
    required: ["city"],
    additionalProperties: false,
  },
};
const ask = { model: "demo", max_tokens: 100, temperature: 0, messages };

const plain = await client.messages.create(ask);
assert.equal(plain.content[0].type, "text");
const streamed = await client.messages.stream(ask).finalMessage();
assert.deepEqual(streamed.content, plain.content);

for (const choice of [{ type: "any" }, { type: "tool", name: "get_weather" }]) {
  const called = await client.messages.create({ ...ask, tools: [tool], tool_choice: choice });
  assert.equal(called.stop_reason, "tool_use");
  assert(["Paris", "Rome"].includes(called.content.find((block) => block.type === "tool_use").input.city));
}
await client.messages.create({ ...ask, tools: [tool] });
await client.messages.create({ ...ask, tools: [tool], tool_choice: { type: "none" } });

const edits = [{ type: "clear_thinking_20251015", keep: "all" }];
const edited = await client.beta.messages.create({ ...ask, context_management: { edits } });
assert.deepEqual(edited.context_management.applied_edits, []);

const model = (await client.models.list()).data[0];
assert(model.max_input_tokens > 0);
await assert.rejects(client.messages.batches.list(), (error) => error.status === 404 && error.error.type === "error");
console.log("done");
