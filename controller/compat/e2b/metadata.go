package e2b

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"strings"

	"github.com/coppice-dev/coppice/controller/compat/e2b/template"
	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// The labels of this layer.
const (
	labelPrefix   = "e2b/"
	labelMetadata = "e2b/metadata-"    // and the number of a part
	labelTemplate = template.LabelName // as the client named it
	labelSnapshot = "e2b/snapshot"     // on checkpoints that a client took as snapshots
	labelName     = "e2b/name"         // the name that a client gave a snapshot
	labelUser     = "e2b/user"         // of a template: the user of processes, if the client names none
	labelDir      = "e2b/workdir"      // of a template: their directory, if the client names none
)

const (
	partBytes    = 256 // the largest value of a label
	maxParts     = 40
	defaultTag   = template.DefaultTag
	snapshotMark = "1"
)

// labelsOf puts metadata into labels.
func labelsOf(metadata map[string]string, named string) (coppice.Labels, error) {
	labels := coppice.Labels{labelTemplate: named}
	if len(metadata) == 0 {
		return labels, nil
	}
	raw, err := json.Marshal(metadata)
	if err != nil {
		return nil, err
	}
	text := base64.RawURLEncoding.EncodeToString(raw)
	if len(text) > partBytes*maxParts {
		return nil, shared.Failf(400, "metadata has %d bytes as JSON; at most %d can be kept", len(raw), partBytes*maxParts*3/4)
	}
	for i := 0; text != ""; i++ {
		n := min(partBytes, len(text))
		labels[fmt.Sprintf("%s%02d", labelMetadata, i)] = text[:n]
		text = text[n:]
	}
	return labels, nil
}

// metadataOf reads metadata back. It returns none if somebody else has changed the labels.
func metadataOf(labels coppice.Labels) map[string]string {
	var text strings.Builder
	for i := range maxParts {
		part, ok := labels[fmt.Sprintf("%s%02d", labelMetadata, i)]
		if !ok {
			break
		}
		text.WriteString(part)
	}
	out := map[string]string{}
	raw, err := base64.RawURLEncoding.DecodeString(text.String())
	if err != nil || json.Unmarshal(raw, &out) != nil {
		return map[string]string{}
	}
	return out
}

// inherited are the labels of this layer that a child has from its parent.
func inherited(labels coppice.Labels) coppice.Labels {
	out := coppice.Labels{}
	for name, value := range labels {
		if strings.HasPrefix(name, labelPrefix) {
			out[name] = value
		}
	}
	return out
}

// metadataFilter reads the filter of a list. E2B's clients encode it twice: the whole, and each key and value within.
func metadataFilter(value string) (map[string]string, error) {
	out := map[string]string{}
	if value == "" {
		return out, nil
	}
	bad := shared.Failf(400, "metadata: it is not a list of encoded key=value pairs")
	once, err := url.QueryUnescape(value)
	if err != nil {
		return nil, bad
	}
	for pair := range strings.SplitSeq(once, "&") {
		key, val, _ := strings.Cut(pair, "=")
		k, err1 := url.QueryUnescape(key)
		v, err2 := url.QueryUnescape(val)
		if err1 != nil || err2 != nil {
			return nil, bad
		}
		out[k] = v
	}
	return out, nil
}

// contains reports whether metadata has every pair of a filter.
func contains(metadata, filter map[string]string) bool {
	rest := maps.Clone(filter)
	maps.DeleteFunc(rest, func(k, v string) bool {
		have, ok := metadata[k]
		return ok && have == v
	})
	return len(rest) == 0
}
