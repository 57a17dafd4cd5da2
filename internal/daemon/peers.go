package daemon

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/peers"
)

// peerClient asks other runners of the cluster, each under the name that its certificate must have.
type peerClient struct {
	identity *mtls.Identity

	mu      sync.Mutex // guards clients
	clients map[core.RunnerID]*http.Client
}

var _ peers.Asker = (*peerClient)(nil)

func newPeerClient(identity *mtls.Identity) *peerClient {
	return &peerClient{identity: identity, clients: make(map[core.RunnerID]*http.Client)}
}

func (p *peerClient) client(id core.RunnerID) *http.Client {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.clients[id] == nil {
		p.clients[id] = &http.Client{
			Transport:     &http.Transport{TLSClientConfig: p.identity.Client(mtls.RunnerName(id)), MaxIdleConnsPerHost: 8, IdleConnTimeout: time.Minute},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		}
	}
	return p.clients[id]
}

// Ask implements peers.Asker. The context bounds it.
func (p *peerClient) Ask(ctx context.Context, peer peers.Peer, key string, off, n int64) ([]byte, error) {
	at := strings.TrimSuffix(peer.Endpoint, "/") + strings.TrimSuffix(runnerapi.PathObject, "{key...}") + key + "?" +
		url.Values{"offset": {strconv.FormatInt(off, 10)}, "bytes": {strconv.FormatInt(n, 10)}}.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return nil, err
	}
	res, err := p.client(peer.ID).Do(req)
	if err != nil {
		return nil, mtls.Refused(err)
	}
	defer res.Body.Close()
	switch res.StatusCode {
	case http.StatusOK:
	case http.StatusNotFound:
		return nil, blob.NotFound(key)
	default:
		return nil, fmt.Errorf("runner %s answered %s", peer.ID, res.Status)
	}
	b, err := io.ReadAll(io.LimitReader(res.Body, n+1))
	if err == nil && int64(len(b)) > n {
		err = fmt.Errorf("runner %s gave more than it was asked for", peer.ID)
	}
	return b, err
}

func (p *peerClient) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.clients {
		c.CloseIdleConnections()
	}
}
