// node ai_sdk.mjs URL MODEL
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [baseURL, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "quire", baseURL, apiKey: "unused", includeUsage: true });
const asked = { model: provider.chatModel(name), prompt: "Who are you?", maxOutputTokens: 8, temperature: 0, maxRetries: 0 };
const whole = await generateText(asked);
assert.ok(whole.usage.outputTokens <= 8);
let text = "";
for await (const part of streamText(asked).textStream) text += part;
assert.strictEqual(text, whole.text);
