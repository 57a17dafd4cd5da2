package lazy

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/runner/pager"
)

// pagerState is the collector of the pager's metrics.
type pagerState struct {
	images *Images

	up, served, pages, here, waiters, demanded, bytes, requests, unheard, hung *prometheus.Desc
}

// Collector returns the metrics of the pager.
func (l *Images) Collector() prometheus.Collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("coppice_pager_"+name, help, labels, nil)
	}
	return &pagerState{
		images:   l,
		up:       desc("up", "1 if the pager answers; 0 if none runs. The runner starts a pager when it first fetches something."),
		served:   desc("images", "Images that the pager serves: arriving, stalled (the store does not deliver a page that is needed), damaged in the store, or complete and still mapped.", "state"),
		pages:    desc("pages", "Pages of the images that are not complete."),
		here:     desc("pages_here", "Pages of the images that are not complete, as far as they are on this host."),
		waiters:  desc("waiters", "Threads of virtual machines that have waited for a page for more than a second."),
		demanded: desc("demanded_pages_total", "Pages that a machine touched before they were on this host."),
		bytes:    desc("read_bytes_total", "Bytes that were read for images: from the host's cache, other runners or the store."),
		requests: desc("requests_total", "Requests for them."),
		unheard:  desc("unheard_total", "Failed requests for the status of a running pager, since the start of the runner. Its machines continue; complete images are not moved to their places meanwhile."),
		hung:     desc("hung_total", "Pagers that were killed because they did not answer, since the start of the runner. The machines that had memory from them ended."),
	}
}

// Describe implements prometheus.Collector.
func (p *pagerState) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{p.up, p.served, p.pages, p.here, p.waiters, p.demanded, p.bytes, p.requests, p.unheard, p.hung} {
		out <- d
	}
}

// pagerScrapeTime bounds how long a scrape waits for the pager.
const pagerScrapeTime = time.Second

// Collect asks the pager.
func (p *pagerState) Collect(out chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, kind, v, labels...)
	}
	p.images.mu.Lock()
	client := p.images.client
	p.images.mu.Unlock()
	var list []pager.Status
	var totals pager.Totals
	err := error(pager.ErrGone)
	if client != nil {
		ctx, cancel := context.WithTimeout(p.images.life, pagerScrapeTime)
		defer cancel()
		list, totals, err = client.List(ctx)
	}
	send(p.hung, prometheus.CounterValue, float64(p.images.hung.Load()))
	send(p.unheard, prometheus.CounterValue, float64(p.images.unheard.Load()))
	if err != nil {
		send(p.up, prometheus.GaugeValue, 0)
		return
	}
	send(p.up, prometheus.GaugeValue, 1)
	states := map[string]int{"arriving": 0, "stalled": 0, "damaged": 0, "whole": 0}
	var pages, here int64
	waiters := 0
	for _, st := range list {
		if st.Record { // an image of a rehearsal: none of its pages are fetched
			continue
		}
		switch {
		case st.Whole:
			states["whole"]++
			continue
		case st.Damaged():
			states["damaged"]++
		case st.Problem != nil || len(st.Waiters) > 0:
			states["stalled"]++
		default:
			states["arriving"]++
		}
		pages, here, waiters = pages+st.Pages, here+st.Here, waiters+max(st.Waiting, len(st.Waiters))
	}
	for state, n := range states {
		send(p.served, prometheus.GaugeValue, float64(n), state)
	}
	send(p.pages, prometheus.GaugeValue, float64(pages))
	send(p.here, prometheus.GaugeValue, float64(here))
	send(p.waiters, prometheus.GaugeValue, float64(waiters))
	send(p.demanded, prometheus.CounterValue, float64(totals.Demanded))
	send(p.bytes, prometheus.CounterValue, float64(totals.Bytes))
	send(p.requests, prometheus.CounterValue, float64(totals.Requests))
}
