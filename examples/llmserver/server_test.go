package main

import (
	"bufio"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func startServer(t *testing.T) (url, dir string) {
	t.Helper()
	dir = t.TempDir()
	w, err := openWeights(filepath.Join(dir, "weights.bin"), 1)
	require.NoError(t, err)
	m, err := newModel(w.pages, 4)
	require.NoError(t, err)
	slot, err := newSlotFile(dir)
	require.NoError(t, err)
	server := httptest.NewServer(newAPI(m, slot).routes())
	t.Cleanup(func() {
		server.Close()
		assert.NoError(t, w.close())
	})
	return server.URL, dir
}

func post(t *testing.T, url, body string) *http.Response {
	t.Helper()
	response, err := http.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(body))
	require.NoError(t, err)
	t.Cleanup(func() { response.Body.Close() })
	return response
}

// streamText puts a streamed answer together again.
func streamText(t *testing.T, response *http.Response) (text string, chunks int) {
	t.Helper()
	assert.Equal(t, "text/event-stream", response.Header.Get("Content-Type"))
	done := false
	scanner := bufio.NewScanner(response.Body)
	for scanner.Scan() {
		data, ok := strings.CutPrefix(scanner.Text(), "data: ")
		if !ok {
			assert.Empty(t, scanner.Text())
			continue
		}
		if data == "[DONE]" {
			done = true
			continue
		}
		var c completion
		require.NoError(t, json.Unmarshal([]byte(data), &c))
		text += c.Choices[0].Delta.Content
		chunks++
	}
	require.NoError(t, scanner.Err())
	assert.True(t, done, "a stream ends with [DONE]")
	return text, chunks
}

func TestStreamSaysTheSameAsOneAnswer(t *testing.T) {
	url, _ := startServer(t)
	const body = `{"messages":[{"role":"user","content":"tell me about the wind"}],"max_tokens":12`
	var whole completion
	require.NoError(t, json.NewDecoder(post(t, url, body+"}").Body).Decode(&whole))
	text, chunks := streamText(t, post(t, url, body+`,"stream":true}`))

	assert.Equal(t, whole.Choices[0].Message.Content, text)
	assert.Len(t, strings.Fields(text), 12)
	assert.Equal(t, 13, chunks, "one for each token and one that says why it ended")
	assert.Equal(t, &usage{PromptTokens: 6, CompletionTokens: 12, TotalTokens: 18}, whole.Usage)
}

func TestAnswersDependOnThePrompt(t *testing.T) {
	url, _ := startServer(t)
	answers := map[string]bool{}
	for _, prompt := range []string{"wind", "water", "stone", "fire"} {
		text, _ := streamText(t, post(t, url, `{"messages":[{"role":"user","content":"`+prompt+`"}],"stream":true}`))
		answers[text] = true
	}
	assert.Len(t, answers, 4)
}

func TestTopLogprobs(t *testing.T) {
	url, _ := startServer(t)
	var c completion
	require.NoError(t, json.NewDecoder(post(t, url,
		`{"messages":[{"role":"user","content":"a"}],"max_tokens":2,"logprobs":true,"top_logprobs":3}`).Body).Decode(&c))
	require.Len(t, c.Choices[0].Logprobs.Content, 2)
	for _, token := range c.Choices[0].Logprobs.Content {
		require.Len(t, token.Top, 3)
		assert.Equal(t, token.Token, token.Top[0].Token, "the likeliest is the one that was said")
		assert.GreaterOrEqual(t, token.Top[0].Logprob, token.Top[1].Logprob)
		assert.Negative(t, token.Logprob)
	}
}

func TestBadRequestsAreNamed(t *testing.T) {
	url, _ := startServer(t)
	for _, c := range []struct {
		name, body string
		status     int
		message    string
	}{
		{"no JSON", `hello`, http.StatusBadRequest, "request body"},
		{"no messages", `{}`, http.StatusBadRequest, "messages"},
		{"too many tokens", `{"messages":[{"content":"a"}],"max_tokens":1000000}`, http.StatusBadRequest, "max_tokens"},
		{"no tokens", `{"messages":[{"content":"a"}],"max_tokens":0}`, http.StatusBadRequest, "max_tokens"},
		{"too long a prompt", `{"messages":[{"content":"` + strings.Repeat("a ", 5000) + `"}]}`, http.StatusBadRequest, "messages"},
		{"too large a body", `{"messages":[{"content":"` + strings.Repeat("a", 2<<20) + `"}]}`, http.StatusRequestEntityTooLarge, "too large"},
		{"top_logprobs alone", `{"messages":[{"content":"a"}],"top_logprobs":2}`, http.StatusBadRequest, "top_logprobs"},
	} {
		t.Run(c.name, func(t *testing.T) {
			response := post(t, url, c.body)
			assert.Equal(t, c.status, response.StatusCode)
			var answer struct {
				Error struct{ Message string }
			}
			require.NoError(t, json.NewDecoder(response.Body).Decode(&answer))
			assert.Contains(t, answer.Error.Message, c.message)
		})
	}
}

// Whoever holds the lock on the state file keeps requests waiting.
func TestRequestsWaitForTheLock(t *testing.T) {
	url, dir := startServer(t)
	fd, err := unix.Open(filepath.Join(dir, "slot.lock"), unix.O_RDWR, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, unix.Flock(fd, unix.LOCK_EX))

	answered := make(chan struct{})
	go func() {
		defer close(answered)
		streamText(t, post(t, url, `{"messages":[{"role":"user","content":"a"}],"stream":true}`))
	}()
	select {
	case <-answered:
		t.Error("answered without the lock")
	case <-time.After(50 * time.Millisecond): // long enough to catch a server that does not lock
	}
	require.NoError(t, unix.Flock(fd, unix.LOCK_UN))
	<-answered
}

func TestVocabularyHasAWordForEachNumberOfTheState(t *testing.T) {
	assert.Len(t, vocabulary, width)
}

func TestWeightsDoNotLieInMemory(t *testing.T) {
	const tmpfs = "/dev/shm"
	var fs unix.Statfs_t
	if err := unix.Statfs(tmpfs, &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		t.Skip("there is no tmpfs at /dev/shm to try")
	}
	path := filepath.Join(tmpfs, "ebpfllm-weights-test.bin")
	t.Cleanup(func() { unix.Unlink(path) })
	_, err := openWeights(path, 1)
	assert.ErrorContains(t, err, "choose a -dir on a disk")
}

func FuzzChat(f *testing.F) {
	f.Add(`{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"stream":true}`)
	f.Add(`{"messages":[{"content":"a"}],"logprobs":true,"top_logprobs":20,"max_tokens":1}`)
	f.Add(`{"messages":null,"max_tokens":-1}`)
	m, err := newModel(make([]byte, 2*matrixSize), 1)
	require.NoError(f, err)
	slot, err := newSlotFile(f.TempDir())
	require.NoError(f, err)
	handler := newAPI(m, slot).routes()
	f.Fuzz(func(t *testing.T, body string) {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/chat/completions", strings.NewReader(body)))
		assert.Less(t, w.Code, 500)
	})
}
