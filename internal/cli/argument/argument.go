// Package argument parses arguments of the command line: pairs, sizes and files with a secret.
package argument

import (
	"errors"
	"fmt"
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

// Each calls f for every reference. It calls f for all of them even if one fails.
func Each(refs []string, f func(ref string) error) error {
	var errs []error
	for _, ref := range refs {
		errs = append(errs, f(ref))
	}
	return errors.Join(errs...)
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
