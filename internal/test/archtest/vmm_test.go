package archtest

import (
	"bytes"
	"fmt"
	"go/scanner"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestControllerKnowsNoVMM: which VMM a runner uses is a word in its class, which the controller compares and never reads.
func TestControllerKnowsNoVMM(t *testing.T) {
	t.Parallel()
	for _, p := range packages(t) {
		if !within(p.path(), "controller") {
			continue
		}
		for _, name := range p.GoFiles {
			source, err := os.ReadFile(filepath.Join(p.Dir, name))
			if err != nil {
				t.Fatal(err)
			}
			for _, where := range namesVMM(source) {
				t.Errorf("%s/%s:%s: nothing in controller/ knows which VMM runs", p.path(), name, where)
			}
		}
	}
}

var vmmNames = regexp.MustCompile(`(?i)qemu|cloud.?hypervisor|firecracker`)

// vmmParts are texts of which every match of vmmNames has one, in small letters.
var vmmParts = []string{"qemu", "hypervisor", "firecracker"}

// namesVMM returns the lines of a Go file in which a name, a string or an import names a VMM. Comments may.
func namesVMM(source []byte) []string {
	// Most files name none, not even in a comment, and the scan is slow.
	lower := bytes.ToLower(source)
	if !slices.ContainsFunc(vmmParts, func(part string) bool { return bytes.Contains(lower, []byte(part)) }) {
		return nil
	}
	var found []string
	var s scanner.Scanner
	files := token.NewFileSet()
	s.Init(files.AddFile("", files.Base(), len(source)), source, nil, 0)
	for {
		pos, tok, text := s.Scan()
		if tok == token.EOF {
			return found
		}
		if vmmNames.MatchString(text) {
			found = append(found, fmt.Sprintf("%d: %s", files.Position(pos).Line, text))
		}
	}
}

func TestNamesVMM(t *testing.T) {
	t.Parallel()
	got := namesVMM([]byte(`package x // of QEMU

import "example.org/runner/vmm/cloudhypervisor"

/* qemu */
func isQEMU(class string) bool { return class == "cloud-hypervisor" || class == "vmm" }
`))
	want := []string{`3: "example.org/runner/vmm/cloudhypervisor"`, "6: isQEMU", `6: "cloud-hypervisor"`}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("names (-want +got):\n%s", diff)
	}
}
