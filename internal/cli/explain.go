package cli

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// explain says in words what the libraries below say in their own: errors of the network, and an interrupt.
func (a *App) explain(ctx context.Context, err error) error {
	var own *core.Error
	var api *coppice.Error
	if errors.As(err, &api) && string(api.Code) == string(core.CodeUnauthenticated) {
		return a.noKey()
	}
	if err == nil || exit.IsMisuse(err) || errors.As(err, &own) || errors.As(err, &api) || errors.As(err, new(exit.StatusError)) {
		return err
	}
	if unfinished, ok := errors.AsType[*coppice.UnfinishedError](err); ok {
		return core.Errorf(core.Canceled, core.CodeCanceled, "interrupted; the server goes on with it: follow it with coppice op show --wait %[1]s or, if it makes workspaces, end it with coppice op cancel %[1]s", core.Clip(unfinished.OperationID))
	}
	if a.tried.Server != "" {
		if text := unreachable(err); text != "" {
			return core.Errorf(core.Unavailable, core.CodeControllerUnreachable, "no server answers at %s (%s): %s; start one with `coppice dev`, or name another with --server or --context: coppice context ls",
				ShownAddress(a.tried.Server), a.tried.Origin, text)
		}
	}
	if local := localFile(err); local != nil {
		return local
	}
	cause := context.Canceled
	if ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) { // a signal has a text of its own
		cause = context.Cause(ctx)
	}
	if errors.Is(err, cause) && strings.HasSuffix(err.Error(), cause.Error()) {
		if request, ok := errors.AsType[*url.Error](err); ok { // of its text the user has only the rest
			err = errors.New(strings.Replace(err.Error(), request.Error(), cause.Error(), 1))
		}
		before := strings.TrimSuffix(strings.TrimSuffix(err.Error(), cause.Error()), ": ")
		return core.Errorf(core.Canceled, core.CodeCanceled, "%s", join(before, "interrupted"))
	}
	return err
}

// noKey says that the server wants a key, or another one.
func (a *App) noKey() error {
	const another = "--token, COPPICE_TOKEN or COPPICE_TOKEN_FILE has it, or a context: coppice context ls"
	server := ShownAddress(a.tried.Server)
	if a.tried.Token == "" {
		return core.Errorf(core.Unauthenticated, core.CodeUnauthenticated, "the server at %s (%s) wants a key, and this command has none; %s", server, a.tried.Origin, another)
	}
	return core.Errorf(core.Unauthenticated, core.CodeUnauthenticated, "the server at %s (%s) does not know the key of this command: it may be another server's, have expired or be revoked; %s",
		server, a.tried.Origin, another)
}

// localFile says in words that a file of this machine cannot be used; nil for another error, and for one that says what was being done.
func localFile(err error) error {
	file, ok := errors.AsType[*fs.PathError](err)
	if !ok || file.Error() != err.Error() {
		return nil
	}
	path := core.Clip(file.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return core.Errorf(core.NotFound, core.CodeFileNotFound, "there is no %s on this machine", path)
	case errors.Is(err, fs.ErrPermission):
		return core.Errorf(core.PermissionDenied, core.CodePermissionDenied, "this user may not use %s of this machine; choose another file, or run the command as the user who may", path)
	case errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT):
		return core.Errorf(core.Exhausted, core.CodeDiskFull, "there is no room left for %s on this machine; make room, or choose another place", path)
	case errors.Is(err, syscall.EISDIR):
		return core.Errorf(core.Invalid, core.CodeInvalidField, "%s on this machine is a directory, and a file is needed", path)
	}
	return nil
}

func join(before, after string) string {
	if before == "" {
		return after
	}
	return before + ": " + after
}

// unreachable says why a server could not be reached; "" for another error.
func unreachable(err error) string {
	var dns *net.DNSError
	var op *net.OpError
	var authority x509.UnknownAuthorityError
	var host x509.HostnameError
	var record tls.RecordHeaderError
	switch {
	case errors.As(err, &dns):
		return fmt.Sprintf("the name %s is not known", core.Clip(dns.Name))
	case errors.As(err, &authority):
		return "its certificate is of an authority that this machine does not trust"
	case errors.As(err, &host):
		return "its certificate is for another name"
	case errors.As(err, &record):
		return "it does not speak TLS there; try http://"
	case errors.As(err, &op) && op.Op == "dial" && errors.Is(err, syscall.ECONNREFUSED):
		return "nobody listens there"
	case errors.As(err, &op) && op.Op == "dial" && errors.Is(err, syscall.ENOENT):
		return "there is no such socket"
	case errors.As(err, &op) && op.Op == "dial" && op.Timeout():
		return "it does not answer in time"
	case errors.As(err, &op) && op.Op == "dial":
		if errno, ok := errors.AsType[syscall.Errno](err); ok {
			return errno.Error()
		}
		return "it cannot be reached"
	}
	return ""
}

// badFlag says in words what is wrong with a flag.
func badFlag(_ *cobra.Command, err error) error {
	var value *pflag.InvalidValueError
	if !errors.As(err, &value) {
		return err
	}
	var wants string
	flag := value.GetFlag()
	switch flag.Value.Type() {
	case "int", "int64", "uint", "uint16", "uint32", "uint64", "count":
		wants = "a whole number"
	case "float64":
		wants = "a number"
	case "bool":
		wants = "true or false"
	case "duration":
		wants = "a duration such as 90s, 30m or 24h"
	default:
		return fmt.Errorf("--%s %q: %w", flag.Name, core.Clip(value.GetValue()), value.Unwrap())
	}
	return fmt.Errorf("--%s %q is not %s", flag.Name, core.Clip(value.GetValue()), wants)
}

// countArguments says in words that there are too many arguments or too few.
func countArguments(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		err := check(c, args)
		if err == nil {
			return nil
		}
		usage := c.UseLine()
		if !strings.Contains(c.Use, " ") {
			return fmt.Errorf("%s takes no argument, and %q is one; usage: %s", c.CommandPath(), core.Clip(args[0]), usage)
		}
		return fmt.Errorf("%s cannot be called with %s; usage: %s", c.CommandPath(), number(len(args)), usage)
	}
}

func number(arguments int) string {
	switch arguments {
	case 0:
		return "no argument"
	case 1:
		return "one argument"
	}
	return fmt.Sprintf("%d arguments", arguments)
}

// unknownCommand names what may have been meant.
func unknownCommand(c *cobra.Command, word string) error {
	c.SuggestionsMinimumDistance = 2
	meant := c.SuggestionsFor(word)
	if len(meant) == 0 {
		return fmt.Errorf("unknown command %q for %q", core.Clip(word), c.CommandPath())
	}
	best := slices.MaxFunc(meant, func(a, b string) int { return alike(word, a) - alike(word, b) })
	return fmt.Errorf("unknown command %q for %q; did you mean %q?", core.Clip(word), c.CommandPath(), c.CommandPath()+" "+best)
}

// alike is the greater, the longer the common beginning is and the less the lengths differ. It chooses among words of which each is near.
func alike(a, b string) int {
	same := 0
	for same < min(len(a), len(b)) && a[same] == b[same] {
		same++
	}
	return 2*same - max(len(a), len(b))
}
