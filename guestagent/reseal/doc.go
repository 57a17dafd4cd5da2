// Package reseal gives a cloned guest its own identity: entropy, clock, ids, names, addresses, keys
// and trusted CAs, step by step and with evidence for each step (docs/adr/0006). It lists the
// processes whose random generators it cannot reach. It freezes and thaws nothing, and keeps no state
// between an agent and the next one.
//
// Without hardware virtualization, code that runs for the first time in a clone is what takes the
// time. So Inspect collects beforehand what it can, and the steps use plain system calls.
package reseal
