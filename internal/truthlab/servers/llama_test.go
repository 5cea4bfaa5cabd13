package servers

import (
	"io"
	"net/http"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTheBindingForNodeStreamsTokens(t *testing.T) {
	for _, program := range []string{"node", "npm"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("needs %s, which runs llama.cpp's binding: apt-get install nodejs npm (%v)", program, err)
		}
	}
	rig := start(t, NodeLlamaCPP())
	body := `{"messages":[{"role":"user","content":"lama lama"}],"max_tokens":3,"stream":true}`
	for range 2 { // one after the other, each with a context of its own
		res, err := http.Post("http://"+rig.Addr+"/v1/chat/completions", "application/json", strings.NewReader(body))
		require.NoError(t, err)
		defer res.Body.Close()
		text, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		assert.Equal(t, 3, strings.Count(string(text), `"chat.completion.chunk"`), "%s", text)
		assert.True(t, strings.HasSuffix(string(text), "data: [DONE]\n\n"), "%s", text)
	}
}
