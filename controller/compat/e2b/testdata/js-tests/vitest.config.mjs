// Runs the tests of E2B's JavaScript package in its folders sandbox and api. Those without a server (msw plays E2B's API) expect its usual
// address. The others use the server of E2B_API_URL. Machines without KVM are slower than E2B's, so a test may take four minutes.

import { readdirSync, readFileSync } from 'node:fs'
import { defineConfig } from 'vitest/config'

const folders = (process.env.TESTS ?? 'tests/sandbox tests/api').split(/\s+/)
const inside = (folder) => readdirSync(folder, { recursive: true }).filter((f) => f.endsWith('.test.ts')).map((f) => `${folder}/${f}`)
const files = folders.flatMap((at) => (at.endsWith('.ts') ? [at] : inside(at)))
const mocked = files.filter((file) => file.endsWith('/urls.test.ts') || readFileSync(file, 'utf8').includes("from 'msw"))

const project = (name, include, env) => ({
  test: {
    name,
    include,
    env,
    setupFiles: ['tests/globalFetchFallback.setup.ts'],
    testTimeout: 240_000,
    hookTimeout: 240_000,
    environment: 'node',
    isolate: true,
    deps: { interopDefault: true },
  },
})

export default defineConfig({
  test: {
    maxWorkers: 3,
    projects: [
      project('server', files.filter((file) => !mocked.includes(file)), {}),
      project('mocked', mocked, { E2B_API_URL: '', E2B_SANDBOX_URL: '' }),
    ].filter((p) => p.test.include.length > 0),
  },
})
