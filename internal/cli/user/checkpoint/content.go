package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/rogpeppe/go-internal/diff"

	"github.com/coppice-dev/coppice/core"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// What --content shows: the lines of so many files, each of so many bytes at most. Other files are named only.
const (
	maxContentFiles = 1000
	maxContentBytes = 1 << 20
	binaryPrefix    = 8000 // a NUL in so many first bytes makes a file binary
)

// diffWithContent is a comparison with the lines that differ.
type diffWithContent struct {
	coppice.CheckpointDiff
	Contents []contentDiff `json:"contents"`
}

// contentDiff is what differs in one file: lines in the unified form, or why they are not shown.
type contentDiff struct {
	Path string `json:"path"`
	Diff string `json:"diff,omitempty"`
	Note string `json:"note,omitempty"`
}

// contents compares the lines of all regular files whose content differs.
func contents(ctx context.Context, client *coppice.Client, d coppice.CheckpointDiff) (diffWithContent, error) {
	out := diffWithContent{CheckpointDiff: d, Contents: []contentDiff{}}
	for _, f := range d.Items {
		if f.Type != coppice.ChangedFile || f.Change == coppice.FileChanged && !differs(f) {
			continue
		}
		one := contentDiff{Path: pathOf(f)}
		switch {
		case len(out.Contents) >= maxContentFiles:
			out.Contents = append(out.Contents, contentDiff{Note: fmt.Sprintf("the content of more than %d files differs; the others are not shown", maxContentFiles)})
			return out, nil
		case f.InMemory:
			one.Note = "it is in the memory of the machines: compare it in running forks"
		case f.PathBase64 != "":
			one.Note = "its name is not text"
		case max(f.SizeBytes, f.SizeBeforeBytes) > maxContentBytes:
			one.Note = fmt.Sprintf("it is larger than %d bytes", maxContentBytes)
		default:
			text, note, err := lines(ctx, client, d, f)
			if err != nil {
				return out, err
			}
			one.Diff, one.Note = text, note
		}
		if one.Diff != "" || one.Note != "" {
			out.Contents = append(out.Contents, one)
		}
	}
	return out, nil
}

func differs(f coppice.FileChange) bool {
	for _, what := range f.What {
		if what == coppice.FileContent || what == coppice.FileTypeChanged {
			return true
		}
	}
	return false
}

// lines compares one file. A file that cannot be read on one side has a note.
func lines(ctx context.Context, client *coppice.Client, d coppice.CheckpointDiff, f coppice.FileChange) (text, note string, err error) {
	before, err := side(ctx, client, d.FromID, f, coppice.FileAdded)
	if err == nil {
		var after []byte
		if after, err = side(ctx, client, d.ToID, f, coppice.FileRemoved); err == nil {
			if binary(before) || binary(after) {
				return "", "it is binary", nil
			}
			return string(diff.Diff("before"+f.Path, before, "after"+f.Path, after)), "", nil
		}
	}
	if e, ok := errors.AsType[*coppice.Error](err); ok && (e.Code == coppice.CodeFileNotFound || e.Code == coppice.CodeInvalidField || e.Code == coppice.Code(core.CodeDiskUnreadable)) {
		return "", "it cannot be read: " + e.Detail, nil // its guest has damaged it, or it was of another type before
	}
	return "", "", err
}

// side reads a file as it is in one of the checkpoints; it is empty where it is absent.
func side(ctx context.Context, client *coppice.Client, id coppice.CheckpointID, f coppice.FileChange, absent coppice.FileChangeChange) ([]byte, error) {
	if f.Change == absent {
		return nil, nil
	}
	body, _, err := client.OpenCheckpointFile(ctx, id, f.Path)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return io.ReadAll(io.LimitReader(body, maxContentBytes))
}

func binary(b []byte) bool { return bytes.IndexByte(b[:min(len(b), binaryPrefix)], 0) >= 0 }

func printContents(w io.Writer, list []contentDiff) {
	for _, c := range list {
		switch {
		case c.Path == "":
			fmt.Fprintf(w, "\n%s\n", c.Note)
		case c.Note != "":
			fmt.Fprintf(w, "\n%s: %s\n", c.Path, c.Note)
		default:
			fmt.Fprintf(w, "\n%s", c.Diff)
		}
	}
}
