// The ai package: generated and streamed text, objects, tools, and tools beside an output format.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const frame = createOpenAICompatible({
  name: "frame", baseURL: `${process.argv[2]}/v1`, apiKey: "none", supportsStructuredOutputs: true,
});
const ask = { model: frame("demo"), prompt: "How is the weather in Rome?", temperature: 0, maxOutputTokens: 100, maxRetries: 0 };
const Mood = z.object({ mood: z.enum(["good", "bad"]) });
const cities = [];
const get_weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async ({ city }) => { cities.push(city); return "It rains."; },
});

assert((await generateText(ask)).text.length > 0);
let text = "";
for await (const part of streamText(ask).textStream) text += part;
assert(text.length > 0);

const { output } = await generateText({ ...ask, output: Output.object({ schema: Mood }) });
assert(["good", "bad"].includes(output.mood));

await generateText({ ...ask, tools: { get_weather }, toolChoice: "required" });
assert(cities.length > 0 && cities.every((city) => ["Paris", "Rome"].includes(city)));

const both = await generateText({
  ...ask, tools: { get_weather }, output: Output.object({ schema: Mood }), stopWhen: stepCountIs(2),
});
if (both.finishReason === "stop") assert(["good", "bad"].includes(both.output.mood));
console.log("done");
