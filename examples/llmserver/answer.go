package main

import (
	"strings"
	"time"
)

// answer turns tokens into the OpenAI API's objects: chunks of a stream, or one
// completion.
type answer struct {
	request      *chatRequest
	id           string
	created      int64
	promptTokens int
	tokens       int
	text         strings.Builder
	logprobs     []tokenLogprob
}

func newAnswer(q *chatRequest, id string, created time.Time, promptTokens, tokens int) *answer {
	return &answer{request: q, id: id, created: created.Unix(), promptTokens: promptTokens, tokens: tokens}
}

type completion struct {
	ID      string   `json:"id"`
	Object  string   `json:"object"`
	Created int64    `json:"created"`
	Model   string   `json:"model"`
	Choices []choice `json:"choices"`
	Usage   *usage   `json:"usage,omitempty"`
}

type choice struct {
	Index        int       `json:"index"`
	Delta        *message  `json:"delta,omitempty"`
	Message      *message  `json:"message,omitempty"`
	Logprobs     *logprobs `json:"logprobs,omitempty"`
	FinishReason *string   `json:"finish_reason"`
}

type message struct {
	Role    string `json:"role,omitempty"`
	Content string `json:"content,omitempty"`
}

type logprobs struct {
	Content []tokenLogprob `json:"content"`
}

type tokenLogprob struct {
	Token   string         `json:"token"`
	Logprob float64        `json:"logprob"`
	Bytes   []int          `json:"bytes"`
	Top     []tokenLogprob `json:"top_logprobs,omitempty"`
}

type usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	TotalTokens      int `json:"total_tokens"`
}

// chunk is one token of a stream.
func (a *answer) chunk(ranked []candidate) *completion {
	c := choice{Delta: &message{Role: "assistant", Content: ranked[0].token + " "}}
	if a.request.Logprobs {
		c.Logprobs = &logprobs{Content: []tokenLogprob{a.logprob(ranked)}}
	}
	return a.object("chat.completion.chunk", c, nil)
}

// last is the chunk that ends a stream.
func (a *answer) last() *completion {
	var u *usage
	if a.request.StreamOptions.IncludeUsage {
		u = a.usage()
	}
	return a.object("chat.completion.chunk", choice{Delta: &message{}, FinishReason: new("length")}, u)
}

// add collects one token for whole.
func (a *answer) add(ranked []candidate) error {
	a.text.WriteString(ranked[0].token + " ")
	if a.request.Logprobs {
		a.logprobs = append(a.logprobs, a.logprob(ranked))
	}
	return nil
}

// whole is the answer to a request that does not stream.
func (a *answer) whole() *completion {
	c := choice{Message: &message{Role: "assistant", Content: a.text.String()}, FinishReason: new("length")}
	if a.request.Logprobs {
		c.Logprobs = &logprobs{Content: a.logprobs}
	}
	return a.object("chat.completion", c, a.usage())
}

func (a *answer) object(kind string, c choice, u *usage) *completion {
	return &completion{ID: a.id, Object: kind, Created: a.created, Model: modelName, Choices: []choice{c}, Usage: u}
}

func (a *answer) usage() *usage {
	return &usage{PromptTokens: a.promptTokens, CompletionTokens: a.tokens, TotalTokens: a.promptTokens + a.tokens}
}

func (a *answer) logprob(ranked []candidate) tokenLogprob {
	one := func(c candidate) tokenLogprob {
		bytes := make([]int, len(c.token))
		for i := range c.token {
			bytes[i] = int(c.token[i])
		}
		return tokenLogprob{Token: c.token, Logprob: c.logprob, Bytes: bytes}
	}
	l := one(ranked[0])
	for _, c := range ranked[:a.request.TopLogprobs] {
		l.Top = append(l.Top, one(c))
	}
	return l
}
