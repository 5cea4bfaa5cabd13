// The chat API on node-llama-cpp: llama.cpp computes on threads of its addon, and
// the event loop waits for it.
//
// POST /v1/chat/completions {"messages":[{"content":TEXT}],"max_tokens":N}
//   answers with a stream of N tokens at most; requests take turns, in the order
//   in which they came
//
// usage: node llama_server.mjs PORT MODULE MODEL
// MODULE is node-llama-cpp's file to import. It prints "ready PID".
import http from 'node:http';

const [port, module, modelPath] = process.argv.slice(2);
const { getLlama } = await import(module);
const llama = await getLlama({ gpu: false, build: 'never', maxThreads: 1, skipDownload: true, progressLogs: false });
const model = await llama.loadModel({ modelPath, useMmap: true });
const context = await model.createContext({ contextSize: 1024, sequences: 1, threads: 1 });
const sequence = context.getSequence();
let turn = Promise.resolve();

async function answer(body, response) {
  const { messages, max_tokens: limit } = JSON.parse(body);
  const tokens = model.tokenize(messages.map((message) => message.content).join('\n'));
  await sequence.clearHistory();
  response.writeHead(200, { 'Content-Type': 'text/event-stream' });
  let left = limit;
  for await (const token of sequence.evaluate(tokens, { yieldEogToken: true })) {
    const delta = { content: model.detokenize([token]) };
    response.write(`data: ${JSON.stringify({ object: 'chat.completion.chunk', choices: [{ index: 0, delta }] })}\n\n`);
    if (--left <= 0) break;
  }
  response.end('data: [DONE]\n\n');
}

const server = http.createServer(async (request, response) => {
  let body = '';
  for await (const part of request) body += part;
  if (request.method !== 'POST') {
    response.writeHead(404).end();
    return;
  }
  turn = turn.then(() => answer(body, response)).catch((error) => {
    console.error(error);
    response.destroy();
  });
});
server.listen(Number(port), '127.0.0.1', () => console.log(`ready ${process.pid}`));
