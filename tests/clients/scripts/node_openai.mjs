// node node_openai.mjs URL MODEL
import assert from "node:assert";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
assert.deepStrictEqual((await client.models.list()).data.map((one) => one.id), [model]);
const asked = { model, messages: [{ role: "user", content: "Who are you?" }], max_completion_tokens: 8, seed: 1 };
const whole = await client.chat.completions.create(asked);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.strictEqual(text, whole.choices[0].message.content);
