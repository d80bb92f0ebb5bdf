// An agent that lives elsewhere: npm install openai; node examples/openai_client.mjs http://127.0.0.1:8001/v1
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: process.env.SPARRING_TOKEN ?? "none" });
const messages = [{ role: "user", content: "What do you do next?" }];
const reply = await client.chat.completions.create({ model: "policy", messages, max_tokens: 24, logprobs: true });
const { token_ids, logprobs, message } = reply.choices[0];
console.log(`${reply.policy_version}: ${message.content} (${token_ids.length} ids, ${logprobs.content.length} log-probs)`);
const stream = await client.chat.completions.create({ model: "policy", messages, max_tokens: 24, stream: true });
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
