package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

// The load: groups of traces, each of which has one span of each service, as
// services export for themselves.
const (
	baseRate   = 20_000 // spans per second
	burst      = 5      // times as many
	burstEvery = time.Minute
	burstFor   = 10 * time.Second // at the end of each burstEvery
	services   = 8
	traces     = 250 // in a group
	senders    = 4
)

// load sends groups of traces to a collector.
type load struct {
	url    string
	client *http.Client

	// Of run, until it has ended:
	groups      int
	burstGroups int // of them, those in bursts
	burstTime   time.Duration
	sendingTook time.Duration

	mu     sync.Mutex
	resent int   // batches
	err    error // of a sender
}

func newLoad(url string) *load {
	return &load{url: url, client: &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: senders}}}
}

// bursting tells whether the load is fivefold at a time since the beginning.
func bursting(at time.Duration) bool { return at%burstEvery >= burstEvery-burstFor }

// run sends at the rate that the time asks for. It catches up when it is late by
// less than a second; beyond, it sends less, and the report says so.
func (l *load) run(ctx context.Context, length time.Duration) error {
	defer l.client.CloseIdleConnections()
	work := make(chan int, senders)
	var all sync.WaitGroup
	for range senders {
		all.Go(func() {
			for group := range work {
				if err := l.sendGroup(ctx, group); err != nil {
					l.mu.Lock()
					l.err = errors.Join(l.err, err)
					l.mu.Unlock()
				}
			}
		})
	}
	begin := time.Now()
	due, last := 0.0, begin
	for ctx.Err() == nil {
		now := time.Now()
		at, passed := now.Sub(begin), now.Sub(last)
		last = now
		if at >= length {
			break
		}
		rate := float64(baseRate) / (services * traces) // groups per second
		if bursting(at) {
			rate *= burst
			l.burstTime += passed
		}
		due = min(due+passed.Seconds()*rate, rate)
		for ; due >= 1; due-- {
			work <- l.groups
			l.groups++
			if bursting(at) {
				l.burstGroups++
			}
		}
		time.Sleep(5 * time.Millisecond)
		l.mu.Lock()
		err := l.err
		l.mu.Unlock()
		if err != nil {
			break
		}
	}
	close(work)
	all.Wait()
	l.sendingTook = time.Since(begin)
	return errors.Join(l.err, ctx.Err())
}

// sendGroup sends each service's spans of a group of traces.
func (l *load) sendGroup(ctx context.Context, group int) error {
	for service := range services {
		body, err := (&ptrace.ProtoMarshaler{}).MarshalTraces(batch(group, service))
		if err != nil {
			return err
		}
		if err := l.send(ctx, body); err != nil {
			return err
		}
	}
	return nil
}

// send hands over a batch, again where the collector asks for that.
func (l *load) send(ctx context.Context, body []byte) error {
	for {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, l.url, bytes.NewReader(body))
		if err != nil {
			return err
		}
		r.Header.Set("Content-Type", "application/x-protobuf")
		response, err := l.client.Do(r)
		if err != nil {
			return err
		}
		answer, _ := io.ReadAll(io.LimitReader(response.Body, 1000))
		response.Body.Close()
		switch response.StatusCode {
		case http.StatusOK:
			return nil
		case http.StatusServiceUnavailable, http.StatusTooManyRequests:
			l.mu.Lock()
			l.resent++
			l.mu.Unlock()
			time.Sleep(50 * time.Millisecond)
		default:
			return fmt.Errorf("the collector answers %s: %q", response.Status, answer)
		}
	}
}

// Of the traces of each group, failedTrace has an error in its last span, and, of
// every tenth group, those below slowTraces take slow: an incident that all of
// them share.
const (
	failedTrace = 100
	slowTraces  = 20
	slow        = 1500 * time.Millisecond
	usual       = 50 * time.Millisecond
)

// wanted tells whether a trace has to be kept.
func wanted(group, trace int) bool {
	return trace == failedTrace || group%10 == 0 && trace < slowTraces
}

// traceID makes the id of a trace: the group and the trace can be read from it.
// The rest, by which samplers sample, is spread.
func traceID(group, trace int) (id pcommon.TraceID) {
	n := uint64(group)*traces + uint64(trace) + 1
	binary.BigEndian.PutUint64(id[:8], n)
	binary.BigEndian.PutUint64(id[8:], n*0x9e3779b97f4a7c15)
	return id
}

// batch is a service's span in each trace of a group, with attributes as an HTTP
// server has them. The first service's span is the root.
func batch(group, service int) ptrace.Traces {
	td := ptrace.NewTraces()
	rs := td.ResourceSpans().AppendEmpty()
	rs.Resource().Attributes().PutStr("service.name", fmt.Sprintf("service-%d", service))
	rs.Resource().Attributes().PutStr("service.instance.id", "3f1c8c7e-52f4-4b6e-9a3f-0d1b1a2c3d4e")
	spans := rs.ScopeSpans().AppendEmpty().Spans()
	spans.EnsureCapacity(traces)
	now := time.Now()
	for i := range traces {
		s := spans.AppendEmpty()
		s.SetTraceID(traceID(group, i))
		s.SetSpanID(pcommon.SpanID{byte(service) + 1})
		if service > 0 {
			s.SetParentSpanID(pcommon.SpanID{byte(service)})
		}
		s.SetName("POST /v1/chat/completions")
		s.SetKind(ptrace.SpanKindServer)
		took := usual + time.Duration(i%20)*time.Millisecond
		if group%10 == 0 && i < slowTraces && service == 3 {
			took = slow
		}
		if i == failedTrace && service == services-1 {
			s.Status().SetCode(ptrace.StatusCodeError)
		}
		s.SetStartTimestamp(pcommon.NewTimestampFromTime(now.Add(-took)))
		s.SetEndTimestamp(pcommon.NewTimestampFromTime(now))
		a := s.Attributes()
		a.PutStr("http.request.method", "POST")
		a.PutStr("url.path", "/v1/chat/completions")
		a.PutStr("server.address", "inference.default.svc")
		a.PutInt("server.port", 8443)
		a.PutInt("http.response.status_code", 200)
		a.PutStr("user_agent.original", "python-requests/2.31.0")
	}
	return td
}

// account notes what was sent, and what of it is missing at the back end.
func (l *load) account(rep *report, end *backEnd) error {
	rep.Traces, rep.Spans, rep.Resent = l.groups*traces, l.groups*traces*services, l.resent
	if calm := l.sendingTook - l.burstTime; calm > 0 {
		rep.Rate = float64((l.groups-l.burstGroups)*traces*services) / calm.Seconds()
	}
	if l.burstTime > 0 {
		rep.Burst = float64(l.burstGroups*traces*services) / l.burstTime.Seconds()
	}
	end.mu.Lock()
	defer end.mu.Unlock()
	rep.Arrived = len(end.traces)
	for group := range l.groups {
		for trace := range traces {
			if wanted(group, trace) {
				rep.Wanted++
				if !end.traces[traceID(group, trace)] {
					rep.Missing++
				}
			}
		}
	}
	return end.err
}
