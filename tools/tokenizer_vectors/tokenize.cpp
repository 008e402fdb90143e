// Tokenizes texts with the vocabulary of a .gguf file.
//
//     tokenize FILE [PRE …]   with each value of tokenizer.ggml.pre, or the file's own
//
// Reads texts from standard input, separated by SEPARATOR. Writes, for each PRE, a line "= PRE ADD_BOS ADD_EOS", then a
// line of ids for each text, without special tokens. Exits with 1 if llama.cpp can't load the vocabulary.
#include <cstdio>
#include <cstring>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "llama.h"

static const std::string SEPARATOR = "\n__ggml_vocab_test__\n";

int main(int argc, char ** argv) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    const std::string input((std::istreambuf_iterator<char>(std::cin)), std::istreambuf_iterator<char>());
    std::vector<std::string> texts;
    for (size_t begin = 0;;) {
        const size_t end = input.find(SEPARATOR, begin);
        texts.push_back(input.substr(begin, end == std::string::npos ? end : end - begin));
        if (end == std::string::npos) break;
        begin = end + SEPARATOR.size();
    }
    std::vector<const char *> names(argv + 2, argv + argc);
    if (names.empty()) names.push_back(nullptr);
    for (const char * name : names) {
        llama_model_params params = llama_model_default_params();
        params.vocab_only = true;
        llama_model_kv_override overrides[2] = {};
        if (name != nullptr) {
            overrides[0].tag = LLAMA_KV_OVERRIDE_TYPE_STR;
            std::strncpy(overrides[0].key, "tokenizer.ggml.pre", sizeof(overrides[0].key) - 1);
            std::strncpy(overrides[0].val_str, name, sizeof(overrides[0].val_str) - 1);
            params.kv_overrides = overrides;
        }
        llama_model * model = llama_model_load_from_file(argv[1], params);
        if (model == nullptr) {
            std::fprintf(stderr, "llama.cpp can't load %s with the pre-tokenizer %s\n", argv[1], name ? name : "-");
            return 1;
        }
        const llama_vocab * vocab = llama_model_get_vocab(model);
        std::printf("= %s %d %d\n", name ? name : "-", llama_vocab_get_add_bos(vocab), llama_vocab_get_add_eos(vocab));
        for (const std::string & text : texts) {
            std::vector<llama_token> ids(text.size() * 4 + 16);
            const int count = llama_tokenize(vocab, text.data(), text.size(), ids.data(), ids.size(), false, false);
            for (int i = 0; i < count; i++) std::printf("%d ", ids[i]);
            std::printf("\n");
        }
        llama_model_free(model);
    }
    return 0;
}
