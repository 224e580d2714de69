// The openai package: streams, parsed answers, tool runs, responses with a format beside tools.
import assert from "node:assert";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "How is the weather in Rome?" }];
const Mood = z.object({ mood: z.enum(["good", "bad"]) });
const tool = {
  type: "function",
  function: {
    name: "get_weather",
    strict: true,
    parameters: {
      type: "object",
      properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};
const ask = { model: "demo", messages, temperature: 0, max_tokens: 100 };

let text = "";
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert(text.length > 0);

const parsed = await client.chat.completions.parse({ ...ask, response_format: zodResponseFormat(Mood, "mood") });
assert(["good", "bad"].includes(parsed.choices[0].message.parsed.mood));

const both = await client.chat.completions.create({
  ...ask, tools: [tool], response_format: zodResponseFormat(Mood, "mood"),
});
const message = both.choices[0].message;
if (message.tool_calls) assert(["Paris", "Rome"].includes(JSON.parse(message.tool_calls[0].function.arguments).city));
else assert(["good", "bad"].includes(JSON.parse(message.content).mood));

const demanded = await client.chat.completions.create({
  ...ask, tools: [tool], tool_choice: "required", response_format: zodResponseFormat(Mood, "mood"),
});
assert.equal(demanded.choices[0].finish_reason, "tool_calls");
assert(["Paris", "Rome"].includes(JSON.parse(demanded.choices[0].message.tool_calls[0].function.arguments).city));

const response = await client.responses.parse({
  model: "demo", input: "How do you feel?", temperature: 0, max_output_tokens: 100,
  text: { format: zodTextFormat(Mood, "mood") },
});
assert(["good", "bad"].includes(response.output_parsed.mood));
console.log("done");
