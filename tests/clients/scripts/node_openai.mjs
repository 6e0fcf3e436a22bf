// node node_openai.mjs URL MODEL
import assert from "node:assert";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
assert.deepStrictEqual((await client.models.list()).data.map((one) => one.id), [model]);
const messages = [{ role: "user", content: "Who are you?" }];
const asked = { model, messages, max_completion_tokens: 8, seed: 1 };
const whole = await client.chat.completions.create(asked);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.strictEqual(text, whole.choices[0].message.content);

// Without the penalty the demo model indents each token of JSON by 40 spaces.
const saying = { model, messages, max_completion_tokens: 600, temperature: 1, seed: 3, frequency_penalty: 2 };
const age = z.number().int().min(0).max(150);
const person = z.strictObject({ name: z.string().max(8), age, mood: z.enum(["glad", "sad"]) });
const guests = z.array(person).min(1).max(2);
const trip = z.strictObject({ host: person, guests, note: z.string().max(8).nullable() });
const response_format = zodResponseFormat(trip, "trip");
const parsed = (await client.chat.completions.parse({ ...saying, response_format })).choices[0].message;
trip.parse(parsed.parsed);
const again = await client.chat.completions.stream({ ...saying, response_format }).finalChatCompletion();
assert.deepStrictEqual(again.choices[0].message.parsed, parsed.parsed);
await client.chat.completions.parse({ ...saying, response_format, messages: [...messages, parsed, ...messages] });

const called = [];
const tools = [
  zodFunction({ name: "invite", parameters: person, function: (guest) => { called.push(guest); return "yes"; } }),
];
const offered = { ...saying, tools, tool_choice: "required", parallel_tool_calls: false };
const first = (await client.chat.completions.parse(offered)).choices[0].message;
person.parse(first.tool_calls[0].function.parsed_arguments);
const streamed = await client.chat.completions.stream(offered).finalChatCompletion();
assert.deepStrictEqual(streamed.choices[0].message.tool_calls, first.tool_calls);
// The helper that calls functions and sends back what they return: with a named function it does so once.
const once = { type: "function", function: { name: "invite" } };
await client.chat.completions.runTools({ ...offered, tool_choice: once }).done();
assert.strictEqual(called.length, 1);

const own = { seed: 3, repetition_penalty: 1.5 };
const responding = { model, input: "Who are you?", temperature: 1, max_output_tokens: 1200, ...own };
const answer = await client.responses.parse({ ...responding, text: { format: zodTextFormat(person, "person") } });
person.parse(answer.output_parsed);
const flat = { type: "function", name: "invite", parameters: z.toJSONSchema(person), strict: true };
const calling = { ...responding, tools: [flat], tool_choice: "required", parallel_tool_calls: false };
const [call] = (await client.responses.create(calling)).output;
person.parse(JSON.parse(call.arguments));
const last = await client.responses.stream(calling).finalResponse();
assert.strictEqual(last.output[0].arguments, call.arguments);
const turns = [
  { role: "user", content: "Who are you?" }, ...answer.output, { role: "user", content: "And?" }, ...last.output,
  { type: "function_call_output", call_id: last.output[0].call_id, output: "yes" },
];
assert.ok((await client.responses.create({ ...calling, input: turns })).output.length);
