// A tool loop with the Vercel AI SDK; the same input and output as tool_loops.py.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createGoogleGenerativeAI } from "@ai-sdk/google";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";

import { createInterface } from "node:readline";

const look = tool({
  description: "Look at a file.",
  inputSchema: z.object({ path: z.string() }),
  execute: async ({ path }) => `contents of ${path}`,
});
const MODELS = {
  chat: (baseURL, apiKey) => createOpenAI({ baseURL, apiKey }).chat("policy"),
  responses: (baseURL, apiKey) => createOpenAI({ baseURL, apiKey })("policy"),
  messages: (baseURL, apiKey) => createAnthropic({ baseURL, apiKey })("policy"),
  gemini: (baseURL, apiKey) => createGoogleGenerativeAI({ baseURL: baseURL.replace(/v1$/, "v1beta"), apiKey })("policy"),
};

async function loop({ dialect, mode, base, key, prompt }) {
  const asked = { model: MODELS[dialect](base, key), prompt, tools: { look }, stopWhen: isStepCount(5) };
  if (mode === "whole") return (await generateText(asked)).text;
  let failed;
  const stream = streamText({ ...asked, onError: ({ error }) => { failed = error; } });
  await stream.consumeStream();
  if (failed) throw failed;
  return await stream.text;
}

for await (const line of createInterface({ input: process.stdin })) {
  let said;
  try {
    said = { text: await loop(JSON.parse(line)) };
  } catch (error) {
    const cause = error.lastError ?? error;
    const message = `${cause.message} ${cause.responseBody ?? ""}`;
    said = { classes: [error.name, cause.name], message, code: cause.data?.error?.code };
  }
  console.log(JSON.stringify(said));
}
