package grants

import (
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
)

// ProviderCustom is a provider without defaults: the request must name the hosts.
const ProviderCustom = "custom"

// provider has the defaults of grants for the secrets of one provider.
type provider struct {
	mode     grant.Mode
	hosts    []string
	header   string
	env      string // the variable in which programs look for the secret
	baseEnv  string // likewise the base URL
	basePath string // the path of a base URL
}

// providers are the providers with defaults. If the clients of a provider read their base URL from a variable, that mode is the default: it
// works with any set of certificates that a client trusts.
var providers = map[string]provider{
	"openai":       {grant.ModeBaseURL, []string{"api.openai.com"}, "Authorization", "OPENAI_API_KEY", "OPENAI_BASE_URL", "/v1"},
	"anthropic":    {grant.ModeBaseURL, []string{"api.anthropic.com"}, "X-Api-Key", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", ""},
	"mistral":      {grant.ModeHeader, []string{"api.mistral.ai"}, "Authorization", "MISTRAL_API_KEY", "", ""},
	"gemini":       {grant.ModeHeader, []string{"generativelanguage.googleapis.com"}, "X-Goog-Api-Key", "GEMINI_API_KEY", "", ""},
	"github":       {grant.ModeHeader, []string{"api.github.com", "github.com"}, "Authorization", "GITHUB_TOKEN", "", ""},
	"gitlab":       {grant.ModeHeader, []string{"gitlab.com"}, "Private-Token", "GITLAB_TOKEN", "", ""},
	"huggingface":  {grant.ModeHeader, []string{"huggingface.co"}, "Authorization", "HF_TOKEN", "", ""},
	ProviderCustom: {mode: grant.ModeHeader, header: "Authorization"},
}

// fill sets the empty fields of a request for a grant to the defaults of its provider.
func (r *Request) fill(name string) error {
	if r.Provider == "" {
		r.Provider = ProviderCustom
		if _, known := providers[name]; known {
			r.Provider = name
		}
	}
	p, known := providers[r.Provider]
	if !known {
		return core.Errorf(core.Invalid, core.CodeInvalidField,
			"provider: %q is not known; leave it out or give %s, and set the other fields", core.Clip(r.Provider), ProviderCustom)
	}
	if r.Mode == "" {
		r.Mode = p.mode
	}
	if len(r.Hosts) == 0 {
		r.Hosts = p.hosts
	}
	if r.Header == "" {
		r.Header = p.header
	}
	if r.Env == "" {
		if r.Env = p.env; r.Env == "" {
			r.Env = variable(name)
		}
	}
	if r.Mode == grant.ModeBaseURL {
		if r.BaseEnv == "" {
			if r.BaseEnv = p.baseEnv; r.BaseEnv == "" {
				r.BaseEnv = variable(name) + "_BASE_URL"
			}
		}
		if r.BasePath == "" {
			r.BasePath = p.basePath
		}
	}
	return nil
}

// variable makes the name of an environment variable from the name of a grant.
func variable(name string) string {
	return strings.Map(func(c rune) rune {
		switch {
		case c >= 'a' && c <= 'z':
			return c - 'a' + 'A'
		case c >= 'A' && c <= 'Z', c >= '0' && c <= '9':
			return c
		}
		return '_'
	}, name)
}
