// Best of N: eight forks of one checkpoint try one proposal each, at the same time. The search goes on from the best.
//
//	node best_of_n.mjs       with a server of `coppice dev`, or with COPPICE_SERVER and COPPICE_TOKEN
import { connect } from "@coppice/sdk";

const width = 8;
const rounds = 3;

/** propose returns what a fork tries. This is the line where a real model goes. */
function propose(best, n) {
  return best + ((n * 37 + 11) % 17) - 5;
}

/** score is how good the result of a fork is: here, how near a number comes to 42. */
function score(text) {
  return -Math.abs(42 - Number(text));
}

const coppice = connect();
const ws = await coppice.create("base");
await ws.files.write("/workspace/answer", "0", { mkdirs: true });
let node = await ws.checkpoint();
let best = { score: score("0"), answer: 0 };
await ws.terminate();

for (let round = 1; round <= rounds; round++) {
  const forks = await node.fork(width);
  for (const { index, error } of forks.failures) console.error(`fork ${index} failed: ${error.message}`);
  const results = await Promise.all(
    forks.map(async (fork, n) => {
      await fork.files.write("/workspace/answer", String(propose(best.answer, n)));
      const { stdout } = (await fork.run("cat /workspace/answer")).check();
      return { fork, answer: Number(stdout), score: score(stdout) };
    }),
  );
  const winner = results.reduce((a, b) => (b.score > a.score ? b : a));
  if (winner.score > best.score) {
    best = winner;
    node = await winner.fork.checkpoint({ annotations: { score: winner.score } });
  }
  await Promise.all(forks.map((fork) => fork.terminate()));
  console.log(`round ${round}: ${best.answer} (score ${best.score})`);
}
console.log(`best: ${best.answer}, in checkpoint ${node.id}`);
coppice.close();
