// Package archtest tests the shape of the tree: who may import whom, that every package says what
// it is, that generated files and documents are current, and how big the guest's program may
// become. It contains only tests.
//
// This command writes the generated files again:
//
//	go test ./internal/test/archtest -update
package archtest
