// A server on Node's http module.
//
// GET /FAULT?N        the event loop's thread suffers the fault
//   none              nothing              cpu?MS    computes
//   sleep?MS          waits for a timer    block?MS  blocks the loop without computing
//   read?MIB          reads FILE, buffered by the kernel only
//   touch?MIB         touches fresh memory
//   pipe?MS           writes to a full pipe that is emptied after MS
//   append?N          appends N lines to LOG
//   code?N            N passes over parts of Node that nothing else here uses
//   collect?MS        garbage collections, one after the other
//   big?KIB           answers with so many KiB
// GET /async/read?MIB the same in libuv's thread pool
//
// The header Fault-Nanoseconds tells how long the fault took.
//
// usage: node --expose-gc server.js PORT FILE LOG FIFO
// It prints "ready PID".
'use strict';
const fs = require('node:fs');
const http = require('node:http');
const { Worker, isMainThread, parentPort, workerData } = require('node:worker_threads');

const pipeSize = 1 << 16;

if (!isMainThread) {
  // empties the pipe after as long as it is told
  const fd = fs.openSync(workerData.fifo, 'r');
  const buffer = Buffer.alloc(pipeSize);
  const cell = new Int32Array(workerData.cell);
  parentPort.postMessage('open');
  for (;;) {
    Atomics.wait(cell, 0, 0);
    const ms = Atomics.exchange(cell, 0, 0);
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ms);
    for (let left = pipeSize; left > 0;) left -= fs.readSync(fd, buffer, 0, left, null);
  }
}

const [port, file, log, fifo] = process.argv.slice(2);
const chunk = Buffer.alloc(1 << 20);
const heap = Array.from({ length: 300000 }, (_, i) => ({ i }));
const cell = new Int32Array(new SharedArrayBuffer(4));
const logFile = fs.openSync(log, 'a');
let pipe;

function during(ms, act) {
  for (const end = performance.now() + ms; performance.now() < end;) act();
}

const faults = {
  none() {},
  cpu: (ms) => during(ms, () => {}),
  block: (ms) => Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ms),
  read(mib) {
    const fd = fs.openSync(file, 'r');
    for (let i = 0; i < mib; i++) fs.readSync(fd, chunk, 0, chunk.length, null);
    fs.closeSync(fd);
  },
  touch(mib) {
    const memory = Buffer.allocUnsafeSlow(mib << 20);
    for (let at = 0; at < memory.length; at += 4096) memory[at] = 1;
  },
  pipe(ms) {
    Atomics.store(cell, 0, ms);
    Atomics.notify(cell, 0);
    fs.writeSync(pipe, chunk, 0, 1);
    fs.writeSync(pipe, chunk, 0, pipeSize - 1); // full again
  },
  append(n) {
    for (let i = 0; i < n; i++) fs.writeSync(logFile, 'a line of a log\n');
  },
  code(n) {
    const crypto = require('node:crypto');
    const zlib = require('node:zlib');
    for (let i = 0; i < n; i++) {
      crypto.createHash('sha512').update('text').digest('hex');
      crypto.generateKeyPairSync('ec', { namedCurve: 'P-256' });
      zlib.inflateSync(zlib.deflateSync('text'));
      zlib.brotliDecompressSync(zlib.brotliCompressSync('text'));
      new Intl.DateTimeFormat('de-DE', { dateStyle: 'full' }).format(0);
      new Intl.Collator('sv').compare('a', 'b');
      new RegExp('(a|b)+\\d{2,3}', 'u').exec('abab12');
      new Function('a', 'return a + ' + i)(1);
    }
  },
  collect: (ms) => during(ms, () => global.gc()),
};

function read(mib, done) {
  fs.open(file, 'r', (err, fd) => {
    if (err) throw err;
    const next = () => (mib-- > 0 ? fs.read(fd, chunk, 0, chunk.length, null, next) : fs.close(fd, done));
    next();
  });
}

const server = http.createServer((request, response) => {
  const [path, query] = request.url.slice(1).split('?');
  const n = Number(query) || 0;
  const begin = process.hrtime.bigint();
  const answer = (body = 'ok') => {
    response.setHeader('Fault-Nanoseconds', String(process.hrtime.bigint() - begin));
    response.end(body);
  };
  if (path === 'sleep') setTimeout(() => answer(), n);
  else if (path === 'async/read') read(n, () => answer());
  else if (path === 'big') answer(Buffer.alloc(n << 10));
  else {
    (faults[path] ?? faults.none)(n);
    answer();
  }
});

if (isMainThread) {
  const worker = new Worker(__filename, { workerData: { fifo, cell: cell.buffer } });
  worker.once('message', () => {
    // both ends are open by now
    server.listen(Number(port), '127.0.0.1', () => console.log(`ready ${process.pid}`));
  });
  pipe = fs.openSync(fifo, 'w');
  fs.writeSync(pipe, chunk, 0, pipeSize);
  faults.code(1);
}
