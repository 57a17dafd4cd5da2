package pgtx_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
)

// TestCachedClassesAreBounded: of classes that no cluster has, 1,000 are kept, then all are forgotten, and none that is longer than 8 KiB. Each is
// right all the same.
func TestCachedClassesAreBounded(t *testing.T) {
	t.Parallel()
	const most, longest = 1000, 8 << 10
	c := pgtx.NewClasses()
	read := func(class runnerapi.RunnerClass) *runnerapi.RunnerClass {
		t.Helper()
		b, err := json.Marshal(class)
		if err != nil {
			t.Fatal(err)
		}
		got, err := c.Of(b)
		if err != nil || *got != class {
			t.Fatalf("the class %+v is %+v, %v", class, got, err)
		}
		return got
	}
	number := func(i int) runnerapi.RunnerClass {
		return runnerapi.RunnerClass{Arch: "amd64", VMMVersion: fmt.Sprint(i)}
	}
	long := func(n int) runnerapi.RunnerClass {
		b, err := json.Marshal(runnerapi.RunnerClass{})
		if err != nil {
			t.Fatal(err)
		}
		return runnerapi.RunnerClass{CPUModel: strings.Repeat("x", n-len(b))}
	}
	kept := func(what string, want int) {
		t.Helper()
		if n := c.Kept(); n != want {
			t.Errorf("%s: %d classes are kept, want %d", what, n, want)
		}
	}
	for i := range most {
		read(number(i))
	}
	kept("as many as there may be", most)
	if first := read(number(0)); first != read(number(0)) {
		t.Error("a class that is kept was decoded again")
	}
	read(number(most))
	kept("one more", 1)
	read(number(0))
	kept("an old one again", 2)
	for _, n := range []int{longest + 1, 1 << 20} {
		if one := read(long(n)); one == read(long(n)) {
			t.Errorf("a class of %d bytes was kept", n)
		}
	}
	kept("long ones", 2)
	if one := read(long(longest)); one != read(long(longest)) {
		t.Error("the longest was not kept")
	}
	kept("the longest", 3)
	if got, err := c.Of([]byte("{")); err == nil {
		t.Errorf("broken JSON is %+v", got)
	}
	kept("broken JSON", 3)
}
