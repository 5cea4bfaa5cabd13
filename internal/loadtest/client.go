package loadtest

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"strings"
	"syscall"
	"time"

	"go.opentelemetry.io/collector/pdata/pcommon"
	"golang.org/x/sys/unix"
)

// request is what a client asks for.
type request struct {
	words, tokens int
	stream        bool
	logprobs      bool // the 20 likeliest tokens with each one: about 1.7 kB a token
	newConn       bool // a connection of its own, not a kept-alive one
	slowReader    bool // with a receive buffer that holds only a part of the answer; implies newConn
}

// sent is a request as the client saw it.
type sent struct {
	TraceID pcommon.TraceID
	SpanID  pcommon.SpanID // the client's span, which the server's spans have as their parent
	Port    int            // the client's
	Start   time.Time
	Latency time.Duration // to the end of the answer
}

type client struct {
	url          string
	kept, single *http.Client
	small        *http.Client
	traceparent  bool
}

// newClient returns a client of the server at the given URL. With traceparent,
// every request carries a trace context of its own.
func newClient(url string, traceparent bool) *client {
	dial := func(receiveBuffer int) func(context.Context, string, string) (net.Conn, error) {
		dialer := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
			if receiveBuffer == 0 {
				return nil
			}
			return errors.Join(c.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer)
			}), err)
		}}
		return dialer.DialContext
	}
	return &client{
		url:         url,
		traceparent: traceparent,
		kept:        &http.Client{Transport: &http.Transport{DialContext: dial(0)}},
		single:      &http.Client{Transport: &http.Transport{DialContext: dial(0), DisableKeepAlives: true}},
		small:       &http.Client{Transport: &http.Transport{DialContext: dial(4096), DisableKeepAlives: true}},
	}
}

func (c *client) close() {
	c.kept.CloseIdleConnections()
}

// do sends a request and reads the whole answer. firstChunk, if not nil, is
// called when the first bytes of the answer are there; the rest of it is read
// after it returned.
func (c *client) do(ctx context.Context, q request, firstChunk func() error) (sent, error) {
	var s sent
	rand.Read(s.TraceID[:]) // never fails
	rand.Read(s.SpanID[:])
	body, err := json.Marshal(map[string]any{
		"model":        "any",
		"messages":     []any{map[string]string{"role": "user", "content": prompt(q.words, s.SpanID[0])}},
		"max_tokens":   q.tokens,
		"stream":       q.stream,
		"logprobs":     q.logprobs,
		"top_logprobs": map[bool]int{true: 20}[q.logprobs],
	})
	if err != nil {
		return s, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return s, err
	}
	// The port tells requests apart where no trace context does.
	r = r.WithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(c httptrace.GotConnInfo) {
		if address, ok := c.Conn.LocalAddr().(*net.TCPAddr); ok {
			s.Port = address.Port
		}
	}}))
	r.Header.Set("Content-Type", "application/json")
	if c.traceparent {
		r.Header.Set("Traceparent", fmt.Sprintf("00-%s-%s-01", s.TraceID, s.SpanID))
	}
	client := c.kept
	if q.slowReader {
		client = c.small
	} else if q.newConn {
		client = c.single
	}

	s.Start = time.Now()
	response, err := client.Do(r)
	if err != nil {
		return s, err
	}
	defer response.Body.Close()
	answer := bufio.NewReaderSize(response.Body, 1024)
	if _, err := answer.Peek(1); err != nil {
		return s, fmt.Errorf("answer: %w", err)
	}
	if firstChunk != nil {
		if err := firstChunk(); err != nil {
			return s, err
		}
	}
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(answer, 1024))
		return s, fmt.Errorf("the server answered %s: %s", response.Status, text)
	}
	tail := make([]byte, 0, 1024)
	for {
		line, err := answer.ReadSlice('\n')
		if len(bytes.TrimSpace(line)) > 0 {
			tail = append(tail[:0], line...)
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return s, fmt.Errorf("answer: %w", err)
		}
	}
	s.Latency = time.Since(s.Start)
	if q.stream && strings.TrimSpace(string(tail)) != "data: [DONE]" {
		return s, fmt.Errorf("the answer's stream ended early, with %q", tail)
	}
	return s, nil
}

// prompt makes n words that differ from one variant to the next. Two syllables
// are one token for the generated llama.cpp model.
func prompt(n int, variant byte) string {
	const consonants, vowels = "bcdfghjklmnprstvwz", "aeiou"
	words := make([]string, n)
	for i := range words {
		x := int(variant)*31 + i*7
		words[i] = string([]byte{
			consonants[x%len(consonants)], vowels[x%len(vowels)],
			consonants[x/3%len(consonants)], vowels[x/2%len(vowels)],
		})
	}
	return strings.Join(words, " ")
}
