package cli

import (
	"context"
	"iter"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/coppice-dev/coppice/core"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// Completion of names: what a command takes is in its usage (WORKSPACE, CHECKPOINT, OPERATION, PROJECT, CONTEXT, IMAGE), and the names come from the
// server. A server that does not answer soon has no names.
const (
	completeTime = 2 * time.Second
	maxCompleted = 200
)

// complete makes a command complete the names that its usage and its flags want.
func (a *App) complete(c *cobra.Command) {
	words := placeholders(c.Use)
	if len(words) > 0 && c.ValidArgsFunction == nil {
		c.ValidArgsFunction = func(c *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			word, ok := placeholderAt(words, len(args))
			if !ok {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return a.namesOf(c.Context(), word)
		}
	}
	for flag, word := range map[string]string{"image": "IMAGE", "in": "WORKSPACE", "workspace": "WORKSPACE", "project": "PROJECT", "context": "CONTEXT"} {
		if c.Flags().Lookup(flag) != nil || c.PersistentFlags().Lookup(flag) != nil {
			_ = c.RegisterFlagCompletionFunc(flag, func(c *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
				return a.namesOf(c.Context(), word)
			}) // it fails only for a flag that has one
		}
	}
}

// placeholders lists the arguments of a usage line in capitals. Of "exec WORKSPACE [flags] [--] COMMAND [ARGUMENT...]" these are WORKSPACE,
// COMMAND and ARGUMENT... .
func placeholders(use string) []string {
	var out []string
	for _, word := range strings.Fields(use)[1:] {
		word = strings.Trim(word, "[]")
		if name := strings.TrimSuffix(word, "..."); name != "" && strings.Trim(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ|:") == "" {
			out = append(out, word)
		}
	}
	return out
}

// placeholderAt is the argument at a position. The last one may be repeated.
func placeholderAt(words []string, at int) (string, bool) {
	last := words[len(words)-1]
	switch {
	case at < len(words):
		return strings.TrimSuffix(words[at], "..."), true
	case strings.HasSuffix(last, "..."):
		return strings.TrimSuffix(last, "..."), true
	}
	return "", false
}

// namesOf lists the names that a placeholder may stand for.
func (a *App) namesOf(ctx context.Context, word string) ([]string, cobra.ShellCompDirective) {
	if word == "SOURCE" || word == "DESTINATION" || word == "COMMAND" || word == "ARGUMENT" || word == "FILE" {
		return nil, cobra.ShellCompDirectiveDefault
	}
	if word == "CONTEXT" {
		file, _, err := a.Contexts()
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return file.Names(), cobra.ShellCompDirectiveNoFileComp
	}
	if object, ok := strings.CutSuffix(word, ":PATH"); ok { // the path is typed
		names, directive := a.namesOf(ctx, object)
		for i, name := range names {
			name, what, described := strings.Cut(name, "\t")
			if names[i] = name + ":/"; described {
				names[i] += "\t" + what
			}
		}
		return names, directive | cobra.ShellCompDirectiveNoSpace
	}
	client, err := a.Client()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	if ctx == nil {
		ctx = context.Background()
	}
	ctx, cancel := context.WithTimeout(ctx, completeTime)
	defer cancel()
	var names []string
	for kind := range strings.SplitSeq(word, "|") {
		switch kind {
		case "WORKSPACE":
			names = collect(names, client.Workspaces(ctx, coppice.WorkspaceFilter{}), func(ws coppice.Workspace) (string, string) { return ws.Name, string(ws.State) })
		case "CHECKPOINT":
			names = collect(names, client.Checkpoints(ctx, coppice.CheckpointFilter{}), func(cp coppice.Checkpoint) (string, string) {
				if cp.Name == "" {
					return cp.ID, string(cp.State)
				}
				return cp.Name, string(cp.State)
			})
		case "OPERATION":
			unended := coppice.OperationFilter{States: []coppice.OperationState{coppice.OperationPending, coppice.OperationRunning}}
			names = collect(names, client.Operations(ctx, unended), func(op coppice.Operation) (string, string) { return op.ID, string(op.Kind) })
		case "PROJECT":
			names = collect(names, client.Projects(ctx), func(p coppice.Project) (string, string) { return p.Name, "" })
		case "IMAGE":
			names = collect(names, client.Images(ctx), func(i coppice.Image) (string, string) { return i.Name, "" })
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// collect adds names with their descriptions. What is no name in the server's rules is left out: a shell would run what it does not expect.
func collect[T any](names []string, list iter.Seq2[T, error], describe func(T) (name, what string)) []string {
	for v, err := range list {
		if err != nil || len(names) >= maxCompleted {
			break
		}
		name, what := describe(v)
		if strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" || name == "" {
			continue
		}
		if what != "" {
			name += "\t" + core.Clip(what)
		}
		names = append(names, name)
	}
	return names
}
