// A process that lives through a fork and draws from every generator that Node has. It prepares all of them first.
const crypto = require("crypto");
const net = require("net");

const many = (f) => Array.from({ length: 64 }, f);
const draw = () => ({
  "Math.random": many(() => Math.random()),
  "crypto.randomBytes": crypto.randomBytes(512).toString("hex"),
  "crypto.randomUUID": many(() => crypto.randomUUID()),
  "crypto.randomUUID without its cache": many(() => crypto.randomUUID({ disableEntropyCache: true })),
});

draw();
net
  .createServer((c) => c.once("data", () => c.end(JSON.stringify(draw()) + "\n")))
  .listen(Number(process.argv[2]), "127.0.0.1");
