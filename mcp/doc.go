// Package mcp is the server of the Model Context Protocol (`coppice mcp`): an agent's host starts
// it, or reaches it over HTTP, and gets Coppice's workspaces, checkpoints and forks as tools.
//
// The package owns the tools, the resources and the prompts, the form of their answers, and who may
// call them over HTTP. It owns no state: it is a client of the public API (sdk/go), and each caller
// can do what the caller's API key can do. The protocol itself is the official Go SDK's.
//
// # Two rules
//
// Data from inside a workspace (output, files, names of files, errors) is untrusted. Every answer
// marks it so (see guest.go), and this package never acts on it: one call of a tool makes the API
// calls that its arguments name, and no others.
//
// Every answer is bounded. An answer that leaves something out says which call gets the rest.
package mcp
