// node ai_sdk.mjs URL MODEL
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "quire", baseURL, apiKey: "unused", includeUsage: true, supportsStructuredOutputs: true,
});
const plain = { model: provider.chatModel(name), prompt: "Who are you?", maxRetries: 0 };
const asked = { ...plain, maxOutputTokens: 8, temperature: 0 };
const whole = await generateText(asked);
assert.ok(whole.usage.outputTokens <= 8);
let text = "";
for await (const part of streamText(asked).textStream) text += part;
assert.strictEqual(text, whole.text);

// Without the penalty the demo model indents each token of JSON by 40 spaces.
const saying = { ...plain, maxOutputTokens: 600, temperature: 1, seed: 3, frequencyPenalty: 2 };
const age = z.number().int().min(0).max(150);
const person = z.strictObject({ name: z.string().max(8), age, mood: z.enum(["glad", "sad"]) });
const guests = z.array(person).min(1).max(2);
const trip = z.strictObject({ host: person, guests, note: z.string().max(8).nullable() });
const { object } = await generateObject({ ...saying, schema: trip });
trip.parse(object);
const streamed = streamObject({ ...saying, schema: trip });
let parts = 0;
for await (const part of streamed.partialObjectStream) parts += Number(part !== undefined);
assert.ok(parts > 3);
assert.deepStrictEqual(await streamed.object, object);
assert.deepStrictEqual((await generateText({ ...saying, output: Output.object({ schema: trip }) })).output, object);

const called = [];
const tools = {
  weather: tool({
    description: "Tells the weather of a city.",
    inputSchema: z.strictObject({ city: z.enum(["Oslo", "Rome"]), days: z.number().int().min(1).max(7) }),
    execute: async ({ city, days }) => { called.push("weather"); return `${city}: ${days} mm`; },
  }),
  invite: tool({
    description: "Invites a person.",
    inputSchema: person,
    strict: true,
    execute: async (guest) => { called.push("invite"); return person.parse(guest); },
  }),
};
// Each step names its tool, the last one none; the calls and their results go back in between.
const order = ["weather", "invite"];
const agent = {
  ...saying, tools, stopWhen: stepCountIs(3),
  prepareStep: ({ stepNumber }) => ({
    toolChoice: order[stepNumber] ? { type: "tool", toolName: order[stepNumber] } : "none",
    providerOptions: { quire: { parallel_tool_calls: false } },
  }),
};
const done = await generateText(agent);
assert.deepStrictEqual(called, order);
assert.deepStrictEqual(done.steps.map((step) => step.finishReason).slice(0, 2), ["tool-calls", "tool-calls"]);
const stream = streamText(agent);
const kinds = new Set();
for await (const part of stream.fullStream) {
  assert.notStrictEqual(part.type, "error", String(part.error));
  kinds.add(part.type);
}
for (const kind of ["tool-input-delta", "tool-call", "tool-result"]) assert.ok(kinds.has(kind), kind);
assert.deepStrictEqual(called, [...order, ...order]);
const required = await generateText({ ...saying, tools, toolChoice: "required" });
assert.ok(required.toolCalls.length > 0 && required.toolCalls.every((call) => !call.invalid));

// The provider of /v1/responses. Without store: false it refers to items by their ids, which a server has to store.
const responding = {
  model: createOpenAI({ baseURL, apiKey: "unused" }).responses(name),
  maxOutputTokens: 1200, temperature: 1, maxRetries: 0,
  providerOptions: { openai: { store: false, parallelToolCalls: false } },
};
const messages = [{ role: "user", content: "Who are you?" }];
const answer = await generateText({ ...responding, messages, output: Output.object({ schema: person }) });
person.parse(answer.output);
const turns = [...messages, ...answer.response.messages, ...messages];
called.length = 0;
const calling = { ...responding, messages: turns, tools: { invite: tools.invite }, stopWhen: stepCountIs(2) };
const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" });
const steps = streamText({ ...calling, prepareStep });
for await (const part of steps.fullStream) assert.notStrictEqual(part.type, "error", String(part.error));
assert.deepStrictEqual(called, ["invite"]);
assert.strictEqual((await steps.steps).length, 2);
