// Package argument parses arguments of the command line: pairs, sizes and files with a secret.
package argument

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/cli/exit"
)

// KeyValues reads words of the form KEY=VALUE.
func KeyValues(flag string, words []string) (map[string]string, error) {
	var out map[string]string
	for _, w := range words {
		k, v, ok := strings.Cut(w, "=")
		if !ok || k == "" {
			return nil, exit.Misuse(fmt.Errorf("%s %q is not of the form KEY=VALUE", flag, w))
		}
		if out == nil {
			out = map[string]string{}
		}
		out[k] = v
	}
	return out, nil
}

// Labels reads changes of labels: KEY=VALUE sets one, and KEY- removes it.
func Labels(words []string) (map[string]*string, error) {
	out := map[string]*string{}
	for _, w := range words {
		key, value, set := strings.Cut(w, "=")
		if !set {
			name, removed := strings.CutSuffix(w, "-")
			if !removed || name == "" {
				return nil, exit.Misuse(fmt.Errorf("%q is neither KEY=VALUE, which sets a label, nor KEY-, which removes it", w))
			}
			key = name
		}
		if key == "" {
			return nil, exit.Misuse(fmt.Errorf("%q has no key", w))
		}
		if _, twice := out[key]; twice {
			return nil, exit.Misuse(fmt.Errorf("label %q is given twice", key))
		}
		out[key] = nil
		if set {
			out[key] = &value
		}
	}
	return out, nil
}

// Each calls f for every reference. It calls f for all of them even if one fails.
func Each(refs []string, f func(ref string) error) error { return EachOf(refs, f) }

// EachOf is Each for things that were found.
func EachOf[T any](things []T, f func(T) error) error {
	var errs []error
	for _, thing := range things {
		errs = append(errs, f(thing))
	}
	return errors.Join(errs...)
}

// All finds what every reference names. If one of them names nothing, the error says which ones do, and that nothing was changed. A thing that is
// named twice is in the result once.
func All[T any](refs []string, find func(ref string) (T, error), id func(T) string) ([]T, error) {
	var found []T
	var errs []error
	seen := map[string]bool{}
	for _, ref := range refs {
		v, err := find(ref)
		switch {
		case err != nil:
			errs = append(errs, err)
		case !seen[id(v)]:
			seen[id(v)] = true
			found = append(found, v)
		}
	}
	if len(errs) > 0 && len(refs) > 1 {
		errs = append(errs, errors.New("nothing was changed"))
	}
	return found, errors.Join(errs...)
}

// Size reads a number of bytes with an optional binary unit.
func Size(s string) (int64, error) {
	digits, unit := strings.TrimRight(s, "KMGT"), strings.TrimLeft(s, "0123456789")
	n, err := strconv.ParseInt(digits, 10, 64)
	shift, ok := map[string]int{"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[unit]
	if err != nil || !ok || n <= 0 || n > 1<<62>>shift {
		return 0, core.Errorf(core.Invalid, core.CodeInvalidField, "%q is not a size such as 512M or 32G", core.Clip(s))
	}
	return n << shift, nil
}

// Secret reads a secret from a file, without the spaces around it.
func Secret(path string) (string, error) {
	b, err := os.ReadFile(path)
	return strings.TrimSpace(string(b)), err
}

// SecretFrom reads a secret from a file, or from in if the file is called "-".
func SecretFrom(path string, in io.Reader) (string, error) {
	if path != "-" {
		return Secret(path)
	}
	const most = 64 << 10
	b, err := io.ReadAll(io.LimitReader(in, most))
	return strings.TrimSpace(string(b)), err
}
