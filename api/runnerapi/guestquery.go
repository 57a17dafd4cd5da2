package runnerapi

import "net/url"

// guestFlags are the agent's boolean parameters, which are 1 or absent. All others are passed on unchanged: a user may be called true.
var guestFlags = map[string]bool{
	"list": true, "tar": true, "stat": true, "recursive": true, "follow": true, "xattrs": true, "mkdirs": true, "untar": true,
	"in_place": true, "append": true, "close": true,
}

// GuestQuery copies the named parameters of a request for the guest's agent, in the agent's form.
func GuestQuery(get func(name string) string, names ...string) url.Values {
	q := url.Values{}
	for _, name := range names {
		v := get(name)
		switch {
		case v == "", guestFlags[name] && v == "false":
		case guestFlags[name] && v == "true":
			q.Set(name, "1")
		default:
			q.Set(name, v)
		}
	}
	return q
}
