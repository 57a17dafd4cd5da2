package events

import (
	"fmt"
	"testing"

	"github.com/coppice-dev/coppice/core"
)

// TestStreamsAreBounded: a controller has 1,024 event streams open, and a project 128 of them.
func TestStreamsAreBounded(t *testing.T) {
	t.Parallel()
	f := New(Config{}, nil)
	project := func(i int) core.ProjectID { return core.ProjectID(fmt.Sprint("prj_", i)) }
	for i := range maxStreams {
		if _, err := f.enter(project(i / maxProjectStreams)); err != nil {
			t.Fatalf("stream %d: %v", i, err)
		}
	}
	if _, err := f.enter(project(maxStreams)); core.CodeOf(err) != core.CodeCapacity {
		t.Errorf("of another project, beyond those of a controller: %v", err)
	}
	f.leave(project(1))
	if _, err := f.enter(project(0)); core.CodeOf(err) != core.CodeCapacity {
		t.Errorf("beyond those of a project: %v", err)
	}
	if _, err := f.enter(project(maxStreams)); err != nil {
		t.Errorf("after another has ended: %v", err)
	}
	for i := range maxStreams {
		if i != maxProjectStreams {
			f.leave(project(i / maxProjectStreams))
		}
	}
	if f.leave(project(maxStreams)); f.total != 0 || len(f.streams) != 0 {
		t.Errorf("%d streams, %d projects are left", f.total, len(f.streams))
	}
}
