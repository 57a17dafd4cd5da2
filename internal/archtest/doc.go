// Package archtest holds the tests of the tree's shape: who may import whom, that every package says what it is, that
// generated files and documents are current, and how big the guest's program may get. It has no code but tests.
//
// What is generated here is written anew by
//
//	go test ./internal/archtest -update
package archtest
