// A workspace, a checkpoint, and two forks that go separate ways.
//
//	node quickstart.mjs      with a server of `coppice dev`, or with COPPICE_SERVER and COPPICE_TOKEN
import { connect } from "@coppice/sdk";

const coppice = connect();
const ws = await coppice.create("base");
try {
  await ws.files.write("/workspace/note", "common\n", { mkdirs: true });
  const before = await ws.checkpoint();

  const [left, right] = await before.fork(2);
  await left.files.write("/workspace/note", "left\n");
  for (const [name, machine] of Object.entries({ ws, left, right })) {
    const { stdout } = (await machine.run("cat /workspace/note")).check();
    console.log(`${name}: ${stdout.trim()}`);
  }
  await Promise.all([left.terminate(), right.terminate()]);
} finally {
  await ws.terminate();
  coppice.close();
}
